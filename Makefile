# make demo    evaluate a real model under three cache formats, record it, verify it, show the table
# make test    run the tests               (PYTEST_ARGS="-m 'not slow'" leaves the slow ones out; JOBS=1: one after the other)
# make lint    ruff, strict mypy, the import walls
# make bench   how fast this machine verifies, appends and runs
# make clean   remove what these commands made
#
# Each sets up its own virtual environment, and again only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV ?= .venv
DEMO ?= .demo
PYTEST_ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/.installed
DEMO_LEDGER := env -u LEDGER_DATABASE $(BIN)/ledger --archive $(DEMO)

.PHONY: help demo test lint bench clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# make/make/p' Makefile

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ...")'
	@echo "installing into $(VENV) (once; torch is the large part)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[runners,postgresql,test]'
	@touch $(READY)

demo: $(READY)
	@test -e $(DEMO)/log/head || $(DEMO_LEDGER) init
	@if $(DEMO_LEDGER) runs --json | grep -q '"outcome": "completed"'; \
	then echo "The demo has run already; again: $(BIN)/ledger --archive $(DEMO) run demo"; \
	else echo "$(BIN)/ledger --archive $(DEMO) run demo"; $(DEMO_LEDGER) run demo; fi
	$(DEMO_LEDGER) verify
	$(DEMO_LEDGER) status
	@echo
	@echo "In a browser: $(BIN)/ledger --archive $(DEMO) serve"

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
