# `make demo` and `make test` do all the set-up that they need.
PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup demo test lint bench clean

help:            ## this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/'

setup:           ## install everything: .venv, engine, Kafka's jars, agent programs
	@bash scripts/setup.sh

demo: setup      ## train a real agent on held-out tasks, from nothing to a report, in ten minutes
	@$(PYTHON) -m polar.cli demo $(ARGS)

test: setup      ## every test, on real Kafka and real vLLM
	@$(PYTHON) -m pytest $(ARGS)

lint: setup      ## ruff, mypy, and the import rules of the rooms
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@.venv/bin/lint-imports

bench: setup     ## the demo over three seeds and a control; one JSON object on the last line
	@$(PYTHON) -m benchmarks.demo --seeds 3 --json

clean:           ## remove runs and caches (not .venv)
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
