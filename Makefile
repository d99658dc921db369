# `make setup` once, then `make check` before every commit. CI runs the same targets: see .ci/run.
VENV ?= .venv
PYTHON ?= $(shell [ -x $(VENV)/bin/python ] && echo $(VENV)/bin/python || echo python)
PYTEST = $(PYTHON) -m pytest -q
BY_FILE = -n 3 --dist loadfile --no-loadscope-reorder # tests of one file share an engine; while one starts, others work
ROTATION ?= due # what CI runs at this commit (tests/rotation.py); all: every test
SHOWS = $(basename $(notdir $(wildcard tests/acceptance/*/[a-z]*.py)))

.PHONY: help setup pins fmt check style unit test bench docs site show-short
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14
	@echo "show-NAME     acceptance tests, each ends with one JSON line: $(SHOWS)"

setup: ## create .venv with the pinned dependencies
	bash .ci/setup $(VENV)

pins: ## write constraints.txt from the current environment, and the requirements files and hashes from it
	(head -n 1 constraints.txt; $(PYTHON) -m pip freeze --all --exclude-editable | sed 's/+cpu//' | \
		grep -viE '^(verl|pip|wheel)\b') > constraints.new
	mv constraints.new constraints.txt
	$(PYTHON) tests/acceptance/_run.py install --write
	PATH="$(dir $(PYTHON)):$$PATH" bash .ci/hash_pins

fmt: ## format, and fix what can be fixed automatically
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

check: ## style, types, layers, unit tests: two minutes
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target style unit # mypy uses one core

style: ## style, types, layers
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	PYTHONPATH=. $(PYTHON) -c "import sys; from importlinter.cli import lint_imports_command as c; c()"

unit: ## unit tests: no processes
	$(PYTEST) -n auto tests/unit

test: ## tests with processes and engines that CI runs at this commit (ROTATION=all for every one); the longest first
	$(PYTEST) $(BY_FILE) --rotation $(ROTATION) tests/e2e tests/distributed tests/contract

bench: ## print figures, assert nothing
	$(PYTEST) -m bench

docs: ## regenerate settings, rules of the diagnosis, files of a step, plans of recipes, tables of engines, the dashboard
	PYTHONPATH=. $(PYTHON) tests/settings_pages.py > docs/settings.md
	PYTHONPATH=. $(PYTHON) tests/settings_pages.py --sft > docs/settings_sft.md
	PYTHONPATH=. $(PYTHON) tests/diagnosis_page.py --write
	PYTHONPATH=. $(PYTHON) tests/step_files.py --write
	PYTHONPATH=. $(PYTHON) tests/recipe_plans.py --write
	PYTHONPATH=. $(PYTHON) tests/engine_tables.py --write
	$(PYTHON) tests/grafana_dashboard.py > examples/monitoring/grafana_dashboard.json

site: ## build the documentation site into site/
	$(PYTHON) -m mkdocs build --strict

show-%:
	$(PYTHON) tests/acceptance/_run.py $* $(ARGS)

show-short: ## the short forms that CI runs at this commit (ROTATION=all for every one)
	$(PYTHON) tests/acceptance/_short.py --rotation $(ROTATION) $(ARGS)
