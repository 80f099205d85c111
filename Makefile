# `make demo` and `make test` set up what they need: a virtual environment each.
PYTHON ?= python3
WITH ?=
# Processes that the tests start would compile the package anew, each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check clean

demo: .venv/ready
	.venv/bin/kvlingo-mlx demo

test: .venv-test/ready
	.venv-test/bin/python -m pytest --numprocesses 2 --dist worksteal

# Format and lint, types, import circles and directions, the shapes of functions. All of them run,
# whichever fail.
check: .venv-test/ready
	@failed=; for tool in "ruff format --check ." "ruff check ." "mypy -p kvlingo_mlx -p benchmarks.paper" \
	    "python -m pytest tests/package/test_conventions.py"; do \
	  echo "$$tool"; .venv-test/bin/$$tool || failed="$$failed '$$tool'"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# pip is upgraded first: old ones do not read the markers that choose MLX's build.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable .
	touch $@

# WITH="torch==2.13.0 lm-eval==0.4.13 matplotlib veloxquant-mlx==0.94.15" adds the tests that need them.
.venv-test/ready: pyproject.toml
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/python -m pip install --quiet --upgrade pip
	$(if $(WITH),.venv-test/bin/python -m pip install --quiet $(WITH))
	.venv-test/bin/python -m pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf .venv .venv-test
