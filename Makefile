# Two commands: `make demo` and `make test`. Each sets up what it needs in .venv, from a clean checkout.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On Linux, pip usually finds the build for CUDA, which runs on a CPU as well.
TORCH ?= torch==2.13.0

# The environment is set up again when pyproject.toml or TORCH changes.
READY := $(VENV)/ready-$(subst /,_,$(TORCH))

# The folder where tests find torchao.
QUANTIZE := $(VENV)/quantize
# The folder where examples find peft.
LORA := $(VENV)/lora
# The folder where tests find xgrammar, without the Triton that it asks for.
SCHEMAS := $(VENV)/schemas
# The folder where tests find the transformers of requirements.txt, beside the newest.
PINNED := $(VENV)/pinned

# An hour. `make test` has a small part of it.
SOAKS := "soak_publish.py --rounds 200" \
  "soak_publish.py --calm --rounds 3 --store s3" \
  "soak_predictions.py --predictions 2000" "fuzz_serving.py --sets --modules 63 --policy block" \
  "fuzz_serving.py --sets --modules 63 --policy background" \
  "fuzz_serving.py --modules 100 --policy block" "fuzz_serving.py --modules 100 --policy background"

.PHONY: setup wheel demo test test-gpu examples container soak lint types clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        boot the demo model in a real Cog server: eager, cold, restored"
	@echo "make test        run the test suite; it uses no GPU"
	@echo "make test-gpu    the tests that need a CUDA GPU"
	@echo "make examples    boot the examples in Cog servers with tiny weights; one alone: make examples EXAMPLE=speech"
	@echo "make setup       the environment alone, in .venv"
	@echo "make wheel       the library for other projects, in dist"
	@echo "make container   build the image as Cog does and boot it in containers; needs root, docker.io and debootstrap"
	@echo "make soak        servers and the store under load and faults, in full"
	@echo "make lint        ruff"
	@echo "make types       mypy"

setup: $(READY)

wheel:
	@rm -rf build  # setuptools would add modules that are gone
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

demo: $(READY)
	$(BIN)/python demo/run_demo.py

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

examples: $(READY)
	PYTHONPATH=$(CURDIR)/$(LORA) $(BIN)/python examples/run_examples.py $(EXAMPLE)

container: $(READY)
	TORCH="$(TORCH)" $(BIN)/python -m pytest tests/container/test_container.py

soak: $(READY)
	@# The property tests, with other examples than in `make test`, and many more.
	$(BIN)/python -m pytest -n auto -m hypothesis --hypothesis-profile=soak
	KILLS=500 $(BIN)/python -m pytest tests/test_background_kills.py
	@failed=; for soak in $(SOAKS); do \
	  echo "== $$soak"; $(BIN)/python benchmarks/$$soak || failed="$$failed $${soak%% *}"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed: install it, or name one as in 'make PYTHON=python3.12 test'"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is missing: install python3-venv (Debian, Ubuntu)"; exit 1; }
	@command -v "$${CXX:-g++}" >/dev/null || \
	  { echo "A C++ compiler is missing, which torch.compile needs: install g++ (Debian, Ubuntu: build-essential)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23" "setuptools>=77"
	@rm -f $(VENV)/ready*
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".[model,dev]"
	@# Not among the others: boots import torchao and peft where they find them.
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(QUANTIZE) "torchao>=0.18"
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(LORA) "peft>=0.21"
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(SCHEMAS) "xgrammar>=0.2.9" apache-tvm-ffi
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(PINNED) "$$(grep ^transformers== requirements.txt)" "huggingface-hub<2"
	@touch $@

clean:
	rm -rf $(VENV) .compile-cache demo/output
