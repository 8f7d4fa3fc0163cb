# Everything is written inside the clone (.venv, runs, tool caches) or in the cache folder RHOTRAIN_CACHE, nowhere else.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
ARGS ?=
JOBS ?= 2 # processes that run the tests; a file's tests share one

# Models, downloads, compiled kernels and temporary files; each of these tools would otherwise pick a folder of its own.
RHOTRAIN_CACHE ?= $(HOME)/.cache/rhotrain
override RHOTRAIN_CACHE := $(abspath $(RHOTRAIN_CACHE))
export RHOTRAIN_CACHE
export XDG_CACHE_HOME := $(RHOTRAIN_CACHE)/tools
export HF_HOME := $(RHOTRAIN_CACHE)/huggingface
export PIP_CACHE_DIR := $(RHOTRAIN_CACHE)/pip
export MPLCONFIGDIR := $(RHOTRAIN_CACHE)/matplotlib
export TRITON_CACHE_DIR := $(RHOTRAIN_CACHE)/triton
export TMPDIR := $(RHOTRAIN_CACHE)/tmp
export PIP_DISABLE_PIP_VERSION_CHECK := 1

INSTALL := -m pip install -c
PYTEST := -m pytest
PARALLEL = -n $(strip $(JOBS)) --dist loadfile
READY := $(VENV)/.ready
OLDEST_READY := $(OLDEST)/.ready
BENCH_READY := $(VENV)/.bench-ready

# A virtual environment in folder $(1); where Python came without ensurepip, the pip beside it fills the environment.
define make-venv
	@$(PYTHON) -c 'import sys; sys.exit("rhotrain needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + \
	  "; name another: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@mkdir -p $(TMPDIR)
	@test -x $(1)/bin/pip || $(PYTHON) -m venv $(1) || { $(PYTHON) -m venv --clear --without-pip $(1) && \
	  $(PYTHON) -m pip --python $(1)/bin/python install pip; }
endef

.NOTPARALLEL:
.PHONY: help setup train test test-slow test-gpu test-oldest lint format mypy typecheck wheel codegen bench bench-gpu clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## build .venv: the package (editable), its extras and the tools, at the tested versions

$(READY): pyproject.toml constraints.txt scripts/link_editable.py
	$(call make-venv,$(VENV))
	$(VENV)/bin/python $(INSTALL) constraints.txt -e '.[tasks,dev,plot,fused,lora,optim]'
	$(VENV)/bin/python scripts/link_editable.py
	@touch $@

train: $(READY) ## train SmolLM2-135M on sums with GRPO; further flags: make train ARGS="--steps 10"
	$(VENV)/bin/rhotrain train --preset smollm2-sums $(ARGS)

test: lint mypy wheel ## lint, types, the wheel's contents and the default tests: what CI runs
	$(VENV)/bin/python $(PYTEST) $(PARALLEL) $(ARGS)

test-slow: $(READY) ## the tests that take minutes, fetch the SmolLM2 weights or install packages
	$(VENV)/bin/python $(PYTEST) -m slow --timeout 3600 $(ARGS)

test-gpu: $(READY) ## the tests that need an NVIDIA GPU; fails where there is none
	RHOTRAIN_TEST_GPU=1 $(VENV)/bin/python $(PYTEST) -m cuda --timeout 1800 $(ARGS)

test-oldest: $(OLDEST_READY) ## the default tests with the oldest supported versions, in a second environment
	$(OLDEST)/bin/python $(PYTEST) $(PARALLEL) $(ARGS)

$(OLDEST_READY): pyproject.toml constraints-oldest.txt
	$(call make-venv,$(OLDEST))
	$(OLDEST)/bin/python $(INSTALL) constraints-oldest.txt -e '.[tasks,dev,plot,fused,lora,optim]'
	@touch $@

lint: $(READY) ## ruff: rules and format
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

format: $(READY) ## apply what lint asks for
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

mypy: $(READY)
	$(VENV)/bin/mypy

typecheck: mypy ## mypy and pyright
	$(VENV)/bin/pyright

wheel: $(READY) ## check that the wheel holds exactly the tracked modules
	$(VENV)/bin/python scripts/check_wheel.py

codegen: $(READY) ## compile every kernel variant for sm_80, sm_90 and sm_100, without a GPU; print and check what came out
	$(VENV)/bin/python -m scripts.codegen $(ARGS)

# A file named in ARGS replaces the whole folder: make bench ARGS="benchmarks/test_kernels.py"
bench: $(BENCH_READY) ## the benchmarks, against the peers
	$(VENV)/bin/python $(PYTEST) $(if $(findstring benchmarks/,$(ARGS)),,benchmarks) --benchmark-only --timeout 3600 $(ARGS)

bench-gpu: $(BENCH_READY) ## kernels, rollout and steps on an NVIDIA GPU, against the peers; writes benchmarks/results/*-<gpu>.json
	RHOTRAIN_TEST_GPU=1 $(VENV)/bin/python $(PYTEST) benchmarks/test_kernels.py benchmarks/test_paged.py \
	  benchmarks/test_rollout.py benchmarks/test_step.py --benchmark-only --benchmark-quiet --bench-json auto --timeout 3600 $(ARGS)

$(BENCH_READY): $(READY)
	$(VENV)/bin/python $(INSTALL) constraints.txt -e '.[bench]'
	@touch $@

clean: ## remove build output and tool caches; keep .venv, runs and the cache folder
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environments too
	rm -rf $(VENV) $(OLDEST)
