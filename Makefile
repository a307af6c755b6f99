# `make demo` and `make test` need Python 3.10 or newer and make; everything else is installed into .venv.
# One environment holds four sets of extras, each with its own stamp file: `make demo` installs no test tools, and a
# second call installs nothing. A change of pyproject.toml triggers a new installation.

PYTHON ?= python3
VENV := .venv
PIP_FLAGS ?=
OLDEST ?= python3.10
NEWEST ?= $(PYTHON)
MATRIX := .venv-matrix
WORKERS ?= 2
PYTEST := pytest --numprocesses $(WORKERS) --dist loadfile

ifeq ($(origin VENV),command line)
# Use the caller's environment as is (offline, a container, a cluster) and install nothing into it.
STAMP_DEMO :=
STAMP_TEST :=
STAMP_BENCH :=
STAMP_DOCS :=
else
STAMP_DEMO := $(VENV)/.stamp-demo
STAMP_TEST := $(VENV)/.stamp-test
STAMP_BENCH := $(VENV)/.stamp-bench
STAMP_DOCS := $(VENV)/.stamp-docs
endif

RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test coverage test-slow test-matrix lint type bench docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "PYTHON=python3.12    Python interpreter for .venv (default: python3)"
	@echo "OLDEST=... NEWEST=...  Python interpreters for test-matrix (default: python3.10 and PYTHON)"
	@echo "WORKERS=4            number of test processes (default: 2)"
	@echo "PIP_FLAGS='...'      extra arguments for pip install, for example --index-url for CPU-only torch"
	@echo "VENV=/path           use an existing environment and install nothing into it"

demo: $(STAMP_DEMO)  ## train Adam and VOGN on real digits; write a table and figures to runs/demo
	@$(RUN) lightning_bayes demo

test: lint type  ## lint, type-check and run the tests
	@echo "make: pytest"
	@$(RUN) $(PYTEST)

coverage: $(STAMP_TEST)  ## run the tests and list the lines they do not cover
	@$(RUN) $(PYTEST) --cov=lightning_bayes --cov-report=term-missing:skip-covered

test-slow: $(STAMP_TEST)  ## run the tests that take minutes
	@$(RUN) $(PYTEST) -m slow

test-matrix: $(MATRIX)/oldest/.stamp $(MATRIX)/newest/.stamp  ## run the tests with the oldest and the newest supported versions
	@for end in oldest newest; do \
	  echo "make: pytest, $$end versions: $$(cat $(MATRIX)/$$end/.stamp)"; \
	  $(MATRIX)/$$end/bin/python -m $(PYTEST) || exit 1; \
	done

$(MATRIX)/oldest/.stamp: pyproject.toml tests/oldest.txt
	@command -v "$(OLDEST)" >/dev/null || { \
	  echo "make: test-matrix needs Python 3.10, and there is no '$(OLDEST)' here." \
	    "Install it, or name it: make test-matrix OLDEST=/path/to/python3.10" >&2; exit 1; }
	@"$(OLDEST)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' || { \
	  echo "make: test-matrix needs Python 3.10 for the oldest versions, '$(OLDEST)' is $$("$(OLDEST)" --version 2>&1)." \
	    "Name it: make test-matrix OLDEST=/path/to/python3.10" >&2; exit 1; }
	@$(call matrix_environment,oldest,$(OLDEST),--constraint tests/oldest.txt)

$(MATRIX)/newest/.stamp: pyproject.toml
	@command -v "$(NEWEST)" >/dev/null || { \
	  echo "make: there is no '$(NEWEST)' here. Name a newer Python: make test-matrix NEWEST=/path/to/python3" >&2; exit 1; }
	@$(call matrix_environment,newest,$(NEWEST),--upgrade --upgrade-strategy eager)

# Arguments: oldest or newest, the interpreter, and pip install arguments that select the versions.
define matrix_environment
	echo "make: creating $(MATRIX)/$(1) with $$("$(2)" --version). This takes minutes: torch is large."; \
	"$(2)" -m venv --clear $(MATRIX)/$(1) && \
	$(MATRIX)/$(1)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --upgrade pip && \
	$(MATRIX)/$(1)/bin/python -m pip --disable-pip-version-check --no-input install --quiet $(PIP_FLAGS) $(3) \
	  --editable '.[test]' && \
	$(MATRIX)/$(1)/bin/python -m pip list 2>/dev/null | awk '/^(torch|lightning|torchmetrics) / { printf "%s %s  ", $$1, $$2 }' > $@
endef

lint: $(STAMP_TEST)  ## run ruff: lint rules and formatting
	@echo "make: ruff"
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .

type: $(STAMP_TEST)  ## run mypy in strict mode
	@echo "make: mypy"
	@$(RUN) mypy

bench: $(STAMP_BENCH)  ## compare the time of an update in a fit with the same optimizer without a callback
	@$(RUN) benchmarks.speed

docs: $(STAMP_DOCS)  ## build the documentation site in build/site; TUTORIALS=run runs all tutorials again
	@TUTORIALS=$(TUTORIALS) NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

clean:  ## remove build artifacts and caches; keep environments and runs/
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
	find . -path './.venv*' -prune -o -name '*.egg-info' -type d -prune -exec rm -rf {} +
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.stamp-venv:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "make: there is no '$(PYTHON)' here. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: lightning-bayes needs Python 3.10 or newer, '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1)." \
	    "Name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' cannot create environments: its modules venv and ensurepip are not installed." \
	    "On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "make: creating .venv with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv --clear .venv
	@$(PIP) install --quiet --upgrade pip
	@touch $@

.venv/.stamp-%: pyproject.toml | .venv/.stamp-venv
	@echo "make: installing lightning-bayes[$*] into .venv. The first time this takes minutes: torch is large."
	@# Show pip's progress bars only in a terminal. setuptools' warning about editable installs is irrelevant here.
	@if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; PYTHONWARNINGS=ignore $(PIP) install $$quiet $(PIP_FLAGS) --editable '.[$*]'
	@echo "make: installed $$($(RUN) pip list 2>/dev/null | awk '/^(torch|lightning) / { printf "%s %s  ", $$1, $$2 }')"
	@touch $@
