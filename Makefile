# make run | make test | make test-full | make test-servers | make check | make bench | make bench-sizes: each sets up .venv
# first, once.
# make gpu-check uses .venv if it is there, and otherwise whatever $(PYTHON) has; it installs nothing.
PYTHON ?= python3
VENV := .venv
SERVERS := .venv-servers
BIN := $(VENV)/bin
LLAMA := xllamacpp==2026.10.11549
# Compiled modules are kept: otherwise every process that tests start compiles them again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

.PHONY: run test test-full test-servers check bench bench-sizes llama gpu-check clean

run: $(VENV)/.ready
	@$(BIN)/python infer.py $(ARGS)

test: $(VENV)/.ready
	@$(PYTEST) -m "not full and not servers"

test-full: $(VENV)/.ready
	@$(PYTEST) -m "not servers"

# The servers run in an environment of their own, as those of users do.
test-servers: $(VENV)/.ready
	@[ -x $(SERVERS)/bin/python ] || $(PYTHON) -m venv $(SERVERS)
	@$(SERVERS)/bin/python -m pip install --quiet --disable-pip-version-check --only-binary=:all: $(LLAMA)
	@SERVERS_PYTHON=$(abspath $(SERVERS))/bin/python $(BIN)/python -m pytest -m servers $(ARGS)

check: $(VENV)/.ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory test

# llama.cpp is a peer of the benchmarks, where its wheel can be had
llama: $(VENV)/.ready
	@$(BIN)/python -c 'import xllamacpp' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary=:all: $(LLAMA) 2>/dev/null || \
	  echo "$(LLAMA) cannot be installed here: the llama.cpp arms are left out"

bench: llama
	@$(BIN)/python tests/benchmarks/bench.py $(ARGS)

# Start, memory, disk and speed by model size and number format, with random weights: less than half an hour.
bench-sizes: llama
	@$(BIN)/python tests/benchmarks/sizes.py $(ARGS)

gpu-check:
	@if [ -e $(VENV)/.ready ]; then python=$(BIN)/python; else python=$(PYTHON); fi; $$python tests/benchmarks/gpu.py $(ARGS)

clean:
	rm -rf $(VENV) $(SERVERS)

$(VENV)/.ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; '$(PYTHON)' is older or missing. Try: make PYTHON=python3.11"; exit 1; }
	@echo "installing $$(grep -c == requirements.txt) packages into $(VENV), once (1.6 GB, more with CUDA; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@
