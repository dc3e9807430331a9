# make quickstart   train a small transformer on real text, sample from it, look at its attention
# make test         lint, types, import rules, docs and tests, in the same environment

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
ARGS   ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# One thread a worker: JOBS processes share the cores, and results do not depend on how many there are.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

.PHONY: help quickstart test test-all lint types imports docs unit families lectures pictures format clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

quickstart: $(VENV)/.installed ## train, write, and show the attention (options in ARGS="--panel encoder")
	$(BIN)/triptych quickstart $(ARGS)

test: lint types imports docs unit ## everything a change must pass, under ten minutes on two cores

test-all: lint types imports docs $(VENV)/.installed-dev ## the same with the long tests
	$(PYTEST) -m ""

lint: $(VENV)/.installed-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## mypy, strict, on src
	$(BIN)/mypy

imports: $(VENV)/.installed-dev ## import-linter: who may import whom
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: $(VENV)/.installed-dev ## the tests alone
	$(PYTEST)

families: $(VENV)/.installed-dev ## docs/families.md from the tests that say what each family can
	$(PYTEST) tests/test_parity.py tests/test_families.py tests/test_families_train.py tests/test_convert.py \
	  tests/test_probe_families.py --write-families

lectures: $(VENV)/.installed-dev ## run the labs that changed, record them in docs/lectures.md (all: ARGS=--again)
	$(BIN)/python tools/lectures.py $(ARGS)

pictures: $(VENV)/.installed-dev ## draw the documentation's pictures anew (some: ARGS="scaling depth")
	$(BIN)/python tools/pictures.py $(ARGS)

format: $(VENV)/.installed-dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and built pages; runs/ stays
	rm -rf $(VENV) site build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The stamps make a second call quick; a changed requirement or pin installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[plot]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[plot,dev,docs]'
	@touch $(VENV)/.installed $@
