# Every target makes the virtual environment that it needs. PYTHON chooses the interpreter (3.11 or later);
# ARGS is passed on, for example: make test ARGS="tests/test_demo.py -x", make bench ARGS=--quick.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# Two files of tests at once: half of the time they wait for processes. ARGS="-n 0" has one after the other.
AT_ONCE := -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help .venv test test-newest soak lint demo bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.venv: .venv/.installed  ## the virtual environment, with pathway (editable) and all that tests and lint need

# The stamp is written last, so that an installation that broke off is done again.
.venv/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

test: .venv/.installed  ## the tests, without the long ones (soak)
	$(BIN)/python -m pytest -q -m "not soak" $(AT_ONCE) $(ARGS)

soak: .venv/.installed  ## the long tests
	$(BIN)/python -m pytest -q -m soak $(ARGS)

lint: .venv/.installed  ## ruff, mypy --strict, and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: .venv/.installed  ## train a digit classifier over two islands; writes demo-graph.svg and demo-timeline.svg
	$(BIN)/python -m pathway.demo $(ARGS)

bench: .venv/.installed  ## dispatch beside raw JAX and other runtimes, as JSON lines
	$(BIN)/python -m bench.dispatch $(ARGS)

# JAX's releases after 0.10 need Python 3.12, so the newest JAX is tested on the newest interpreter that is here.
# A pyenv shim may stand in PATH for a version that is not switched on: each candidate is started to find out.
NEWEST_PYTHON = $(shell for python in python3.13 $$HOME/.pyenv/versions/3.13*/bin/python3 python3.12 \
  $$HOME/.pyenv/versions/3.12*/bin/python3; do \
  "$$python" -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)

test-newest:  ## the tests on Python 3.13 or 3.12 with the newest JAX, where one is installed
	@if [ -z "$(NEWEST_PYTHON)" ]; then \
	  echo "test-newest: no Python 3.13 or 3.12 in PATH or ~/.pyenv/versions: nothing was tested"; \
	else \
	  $(MAKE) --no-print-directory .venv-newest/.installed && \
	  .venv-newest/bin/python -c 'import jax, sys; print("Python", sys.version.split()[0], "JAX", jax.__version__)' && \
	  .venv-newest/bin/python -m pytest -q -m "not soak" $(AT_ONCE) $(ARGS); \
	fi

.venv-newest/.installed: pyproject.toml
	$(NEWEST_PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:  ## remove what was built, downloaded or cached here
	rm -rf .venv .venv-newest build dist *.egg-info bench/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache demo-graph.svg demo-timeline.svg
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
