# Everything works from a fresh clone: the virtual environment is made when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# Installed first, so that nothing else chooses a build of it. See docs/dependencies.md for other builds.
TORCH ?= $(shell grep "^torch==" requirements.lock)
# Test processes at once; one thread each, as their tensors are small.
JOBS ?= 2
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help serve install test gpu-show lint format docs lock image-check clean

help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile

serve: $(VENV)/.runtime  ## Serve the shipped model; options as EYAS_* variables.
	@exec $(BIN)/eyas serve

install: $(VENV)/.dev  ## Install everything, tools for development included.

test: $(VENV)/.dev  ## Run the tests (PYTEST_ARGS adds arguments).
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(PYTEST_ARGS)

gpu-show: $(VENV)/.dev  ## Print one table of what this GPU shows (SHOW_ARGS adds arguments).
	$(BIN)/python -m tests.gpu.show $(SHOW_ARGS)

lint: $(VENV)/.dev  ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev  ## Write the generated documentation.
	$(BIN)/python -m service.metrics > docs/metrics.md
	$(BIN)/python -m deploy.grafana.generate
	$(BIN)/python -m service.options_table > $(VENV)/options.md
	sed -i -e '/<!-- options -->/,/<!-- \/options -->/{//!d}' -e '/<!-- options -->/r $(VENV)/options.md' README.md

image-check:  ## Prove the container image's steps in a clean Debian root (as root).
	deploy/image_check.sh

LOCK := --quiet --upgrade --strip-extras --no-annotate --no-header --allow-unsafe \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host
lock: $(VENV)/.dev  ## Choose the newest allowed versions anew.
	$(PIP) install "pip-tools>=7.5"
	$(BIN)/pip-compile $(LOCK) -o requirements.lock pyproject.toml
	$(BIN)/pip-compile $(LOCK) --extra dev -o requirements-dev.lock pyproject.toml
	sed -i -e 's/+cpu$$//' requirements.lock requirements-dev.lock
	$(BIN)/pip-compile $(LOCK) --extra dev --extra grammar -o $(VENV)/grammar.lock pyproject.toml
	sed -i -e '/^[^#]/d' requirements-grammar.lock
	grep -E '^(apache-tvm-ffi|regex|transformers|xgrammar)==' $(VENV)/grammar.lock >> requirements-grammar.lock

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or \
		sys.exit("Python 3.11 to 3.13 is needed, $(PYTHON) is %d.%d: make PYTHON=..." % v)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: requirements.lock requirements-grammar.lock pyproject.toml | $(VENV)/.python
	$(PIP) install $(TORCH)
	$(PIP) install -r requirements.lock
	$(PIP) install --no-deps -r requirements-grammar.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.runtime
	$(PIP) install -r requirements-dev.lock
	@touch $@
