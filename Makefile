# make run | make test | make test-full | make check | make bench: each sets up .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

.PHONY: run test test-full check bench clean

run: $(VENV)/.ready
	@$(BIN)/python infer.py $(ARGS)

test: $(VENV)/.ready
	@$(PYTEST) -m "not full"

test-full: $(VENV)/.ready
	@$(PYTEST)

check: $(VENV)/.ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory test

bench: $(VENV)/.ready
	@$(BIN)/python tests/benchmarks/bench.py $(ARGS)

clean:
	rm -rf $(VENV)

$(VENV)/.ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; '$(PYTHON)' is older or missing. Try: make PYTHON=python3.11"; exit 1; }
	@echo "installing $$(grep -c == requirements.txt) packages into $(VENV), once (1.5 GB, more with CUDA; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@
