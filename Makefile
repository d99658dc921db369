# `make setup` once, then `make check` before every commit. CI runs the same targets: see .ci/run.
VENV ?= .venv
PYTHON ?= $(shell [ -x $(VENV)/bin/python ] && echo $(VENV)/bin/python || echo python)
PYTEST = $(PYTHON) -m pytest -q
BY_FILE = -n 2 --dist loadfile # an engine serves the tests of one file; while one starts, others work
SHOWS = $(basename $(notdir $(wildcard tests/acceptance/[a-z]*.py)))

.PHONY: help setup pins fmt check unit test e2e bench docs show-short
help: ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14
	@echo "show-NAME     proofs, each ends with one JSON line: $(SHOWS)"

setup: ## an environment in .venv with the pinned dependencies
	bash .ci/setup $(VENV)

pins: ## write constraints.txt from the current environment
	$(PYTHON) -m pip freeze --all --exclude-editable | sed 's/+cpu//' | grep -viE '^(verl|pip|wheel)\b' > constraints.txt

fmt: ## format and mend what can be mended
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

check: ## style, types, layers, unit tests: a coffee break
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	PYTHONPATH=. $(PYTHON) -c "import sys; from importlinter.cli import lint_imports_command as c; c()"
	$(PYTEST) -n auto tests/unit

unit: ## unit tests: no processes
	$(PYTEST) -n auto tests/unit

test: ## contract and distributed tests
	$(PYTEST) $(BY_FILE) -m "contract or distributed"

e2e: ## real Ray, FSDP2 and vLLM with a tiny model
	$(PYTEST) $(BY_FILE) -m e2e

bench: ## figures, nothing asserted
	$(PYTEST) -m bench

docs: ## regenerate the settings reference
	$(PYTHON) -m verl.config.reference > docs/settings.md

show-%:
	$(PYTHON) tests/acceptance/$(subst -,_,$*).py $(ARGS)

# Two at a time: what starts no cluster first, then what does. Nothing in a short form is bounded by the clock.
LIGHT = surface settings formulas gradient sft sandbox unearned hostile_rewards grading simulation torn disk reshard merge offload
HEAVY = learning kills parity api algorithms lora trust families stall dataplane

show-short: ## the short form of every proof that CI runs
	@$(MAKE) --no-print-directory -k -j2 --output-sync=target $(addprefix short-,$(LIGHT))
	@$(MAKE) --no-print-directory -k -j2 --output-sync=target $(addprefix short-,$(HEAVY))

short-%:
	$(PYTHON) tests/acceptance/$*.py --short
