# `make demo` and `make test` set up what they need: a virtual environment each.
PYTHON ?= python3
VENV ?= .venv-test
EXTRAS = torch==2.13.0 lm-eval==0.4.13 matplotlib veloxquant-mlx==0.94.15
PYTEST = -m pytest --numprocesses 2 --dist worksteal
# Processes that the tests start would compile the package anew, each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-extras check clean

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

# pip is upgraded first: old ones do not read the markers that choose MLX's build.
%/ready: pyproject.toml
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --upgrade pip
	$*/bin/python -m pip install --quiet $(if $(findstring extras,$*),$(EXTRAS)) --editable "."$(if $(findstring .venv-,$*),"[test]")
	touch $@

clean:
	rm -rf .venv .venv-test .venv-extras
