# make train   installs what is missing, then trains the quickstart (ARGS="--new" and other flags)
# make test    the same set-up, then the tests that need no more than a few minutes
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
CONFIG ?= configs/quickstart.yaml
ARGS ?=
# Where pip finds torch. Without a GPU, an index of CPU builds saves some gigabytes:
#   make train TORCH_ARGS="--index-url URL"
TORCH_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What tests, checks and benchmarks need besides; one package of it is compiled.
DEV := $(VENV)/.installed-dev
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
CANDIDATES := python3.11 python3.12 python3 /usr/bin/python3
PYTHON ?= $(shell for p in $(CANDIDATES); do $$p -c '$(USABLE)' 2>/dev/null && echo $$p && break; done)
TORCH := $(shell grep -o '^torch==[0-9.]*' constraints.txt)
export OMP_NUM_THREADS ?= 1
# So many processes share the test files, in their order (what takes long begins first);
# ARGS="-n 0 --pdb" runs them in this one.
TEST_PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: train test test-slow test-all test-gpu test-sglang lint format install python bench-quickstart bench-overhead bench-noop

train: $(STAMP)
	$(BIN)/slime train $(CONFIG) $(ARGS)

test: $(DEV)
	$(PYTEST) -m "not slow and not gpu and not sglang" $(ARGS)

test-slow: $(DEV)
	$(PYTEST) -m "slow and not gpu and not sglang" $(ARGS)

test-all: $(DEV)
	$(PYTEST) -m "not gpu and not sglang" $(ARGS)

test-gpu: $(DEV)
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Real SGLang on a CPU, in an environment of its own (3 GB; its pins want Python 3.11).
test-sglang: $(DEV) $(SGLANG_VENV)/.installed
	SLIME_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python \
		$(BIN)/python -m pytest -m sglang -s $(ARGS)

$(SGLANG_VENV)/.installed: tests/sglang_cpu/requirements.txt
	python3.11 -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps $(TORCH_ARGS) -r $<
	touch $@

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-quickstart: $(DEV)
	$(BIN)/python -m benchmarks.quickstart $(ARGS)

bench-overhead: $(DEV)
	$(BIN)/python -m benchmarks.overhead $(ARGS)

bench-noop: $(DEV)
	$(BIN)/python -m benchmarks.noop $(ARGS)

install: $(STAMP)

python:
	@echo $(PYTHON)

# torch goes first and alone: pip then takes the build that lies at hand (a CPU one where there is
# no GPU), and what follows keeps it.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
	  echo "no Python 3.11 or 3.12 with venv was found: install python3 and python3-venv (Debian)," \
	       "or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_ARGS) "$(TORCH)"
	$(BIN)/python -m pip install -c constraints.txt -e '.[query]'
	@touch $@

$(DEV): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@
