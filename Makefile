# `make demo` and `make test` set up what they need: a virtual environment each.
PYTHON ?= python3
VENV ?= .venv-test
EXTRAS = torch==2.13.0 lm-eval==0.4.13 matplotlib veloxquant-mlx==0.94.15
PYTEST = -m pytest --numprocesses 2 --dist worksteal
# Processes that the tests start would compile the package anew, each of them.
unexport PYTHONDONTWRITEBYTECODE

REAL = Qwen/Qwen2.5-Coder-0.5B-Instruct Qwen/Qwen2.5-Coder-1.5B-Instruct
MINUTES = 40
.PHONY: demo test test-extras check real clean

demo: .venv/ready
	.venv/bin/kvlingo-mlx demo

test: .venv-test/ready
	.venv-test/bin/python $(PYTEST)

# What `make test` skipped since PyTorch, lm-eval, matplotlib or VeloxQuant-MLX was not there.
test-extras: .venv-extras/ready
	.venv-extras/bin/python $(PYTEST) --extras-only

# Format and lint, types, import circles and directions, the shapes of functions. All of them run,
# whichever fail.
check: $(VENV)/ready
	@failed=; for tool in "ruff format --check ." "ruff check ." "mypy -p kvlingo_mlx -p benchmarks.paper" \
	    "python -m pytest tests/package/test_conventions.py"; do \
	  echo "$$tool"; $(VENV)/bin/$$tool || failed="$$failed '$$tool'"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# By hand: a translator of two real models, made and judged against the record of docs/real-pairs.md.
# REAL="A B" names the models by folders; it takes three hours on one core, and goes on if stopped.
real: .venv-extras/ready
	mkdir -p build/real
	test -f build/real/chats.jsonl || .venv-extras/bin/python benchmarks/real_pair.py write --out build/real/chats.jsonl
	.venv-extras/bin/kvlingo-mlx train $(REAL) --device cpu --data build/real/chats.jsonl --out build/real/translator \
	  --minutes $(MINUTES) --nu 24 --lr 2e-4 --batch-size 4 --max-prefix 1024 --max-continuation 160 -c whitened=true \
	  -c reads=104 -c matching=0.94 -c packed_share=0 -c later_turns=true -c fit_samples=104 -c held_out=8
	.venv-extras/bin/python benchmarks/real_pair.py read $(REAL) --out build/real/readings
	.venv-extras/bin/python benchmarks/real_pair.py judge $(REAL) trained=build/real/translator \
	  --readings build/real/readings --scores build/real/scores.jsonl --against benchmarks/results/real_pair.jsonl

# pip is upgraded first: old ones do not read the markers that choose MLX's build.
%/ready: pyproject.toml
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --upgrade pip
	$*/bin/python -m pip install --quiet $(if $(findstring extras,$*),$(EXTRAS)) --editable "."$(if $(findstring .venv-,$*),"[test]")
	touch $@

clean:
	rm -rf .venv .venv-test .venv-extras
