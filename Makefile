# Two commands: `make demo` and `make test`. Each sets up what it needs in .venv, from a clean checkout.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What pip finds: on Linux usually the build for CUDA, which runs on a CPU as well.
TORCH ?= torch==2.13.0

.PHONY: demo test lint types clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   boot the demo model in a real Cog server: eager, cold, restored"
	@echo "make test   run the whole test suite"
	@echo "make lint   ruff"
	@echo "make types  mypy"

demo: $(VENV)/ready
	$(BIN)/python demo/run_demo.py

test: $(VENV)/ready
	$(BIN)/python -m pytest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy

$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  { echo "Python 3.10 or newer is needed: install it, or name one as in 'make PYTHON=python3.12 test'"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is missing: install python3-venv (Debian, Ubuntu)"; exit 1; }
	@command -v "$${CXX:-g++}" >/dev/null || \
	  { echo "A C++ compiler is missing, which torch.compile needs: install g++ (Debian, Ubuntu: build-essential)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23" "setuptools>=77"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[model,dev]"
	@touch $@

clean:
	rm -rf $(VENV) .compile-cache demo/output
