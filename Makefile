# Every target makes what it needs first: the environment in .venv and the embedded broker.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
FAULTS ?=
# Two at a time, each with a broker of its own: the tests of a file stay together, the files in their order.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: setup up demo test test-faults check bench format lock

setup: $(READY)

$(READY): requirements.lock pyproject.toml services/embedded/kafka.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Python 3.11 or newer is needed: make setup PYTHON=python3.12'; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/openrelay fetch-broker
	@touch $@

up: $(READY)  ## everything on this machine, until interrupted
	$(BIN)/openrelay up

demo: $(READY)  ## start everything, run a sample batch, show the results and the bill, stop
	$(BIN)/python -m services.cli.demo

# Hundreds of processes are started: what they run is compiled once, wherever else that is switched off.
test test-faults: export PYTHONDONTWRITEBYTECODE :=

test: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not faults and not cluster'

test-faults: $(READY)  ## the same promises while processes are killed; FAULTS='-k name' chooses
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m faults $(FAULTS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m tests.bench

COMPILE := uv pip compile pyproject.toml --group build --universal --generate-hashes \
  --python-version 3.11 --no-emit-index-url --no-header --quiet

lock:  ## needs uv; after a change of dependencies, or of the broker's version in services/embedded/jars.py
	$(COMPILE) --group dev --output-file requirements.lock
	$(COMPILE) --constraint requirements.lock --output-file requirements.runtime.lock
	$(BIN)/python -c 'from services.embedded import jars; jars.LOCK.write_text(jars.relock())'
