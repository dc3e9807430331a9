# make quickstart   train a small transformer on real text, sample from it, look at its attention
# make test         lint, types, import rules, docs and the short run of the tests, in the same environment

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
ARGS   ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Compiled modules are kept, also where the environment says otherwise: the tests start some hundred processes.
export PYTHONDONTWRITEBYTECODE :=

# One thread a worker: JOBS processes share the cores, and results do not depend on how many there are.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

MYPY   := $(BIN)/mypy
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Without its cache mypy takes one core for most of a minute: it and mkdocs run beside the tests.  What they report
# follows the report of the tests, and the target fails if any of the three does.
with_types_and_docs = @echo '$(1), beside mypy and mkdocs'; \
	{ $(MYPY) && $(MKDOCS); } > $(VENV)/types-and-docs.log 2>&1 & beside=$$!; \
	trap 'kill $$beside' INT TERM; \
	$(1); tests=$$?; \
	wait $$beside; beside=$$?; \
	cat $(VENV)/types-and-docs.log; \
	exit $$((tests || beside))

.PHONY: help quickstart test test-all test-rest test-labs test-processors durations lint types imports docs unit families lectures \
  pictures format wheel clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# Without --resume, the run of the last `make quickstart` is deleted.
quickstart: $(VENV)/.installed ## train, sample, write a page that runs the model (options in ARGS="--panel encoder")
	$(BIN)/triptych quickstart $(if $(filter --resume --force,$(ARGS)),,--force) $(ARGS)

test: lint imports ## lint, types, docs and the short run of the tests: under five minutes on two cores
	$(call with_types_and_docs,$(PYTEST))

test-all: lint imports ## the same with every test
	$(call with_types_and_docs,$(PYTEST) -m "")

# The tests behind docs/families.md run again, because the page is compared in a run that has all of them.
test-rest: $(VENV)/.installed-dev ## the tests that `make test` leaves out, but for labs at full size and most broken ones
	$(PYTEST) -m "(heavy or families) and not long"

test-labs: $(VENV)/.installed-dev ## every test of the labs, those that are broken on purpose and those at full size too
	$(PYTEST) -m "" tests/test_lab_*.py tests/test_labs*.py

# Other settings of the libraries that multiply, one after the other; some: ARGS="--only MKL".
test-processors: $(VENV)/.installed-dev ## the tests that depend on arithmetic, as other processors compute it
	$(BIN)/python tests/processors.py -n $(JOBS) $(ARGS)

durations: $(VENV)/.installed-dev ## every test on a quiet machine; the slowest 30 into bench/test-all.txt
	$(PYTEST) -m "" --durations=30 > bench/test-all.log
	{ echo "The slowest tests of a whole run: pytest -m \"\" -n $(JOBS), one thread a worker, $$(date -u +%F), $$(nproc) cores,"; \
	  $(BIN)/python -c "import platform, torch; print(f'torch {torch.__version__}, Python {platform.python_version()}.')"; \
	  echo; sed -n '/slowest/,$$p' bench/test-all.log; } > bench/test-all.txt
	rm bench/test-all.log

lint: $(VENV)/.installed-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## mypy, strict, on src
	$(MYPY)

imports: $(VENV)/.installed-dev ## import-linter: which package may import which
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev ## build the documentation into site/
	$(MKDOCS)

unit: $(VENV)/.installed-dev ## the short run of the tests alone
	$(PYTEST)

families: $(VENV)/.installed-dev ## write docs/families.md from the tests of every family
	$(PYTEST) -m families --write-families

lectures: $(VENV)/.installed-dev ## run the stale labs and record them in docs/lectures.md (all: ARGS=--again; list: ARGS=--stale)
	$(BIN)/python tools/lectures.py $(ARGS)

pictures: $(VENV)/.installed-dev ## draw the pictures of the documentation (some: ARGS="scaling depth")
	$(BIN)/python tools/pictures.py $(ARGS)

wheel: $(VENV)/.installed ## build a wheel into dist/, which pip installs into another environment
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist .

format: $(VENV)/.installed-dev ## format the code and apply ruff's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and built pages; runs/ stays
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The empty files .installed and .installed-dev record that the environment is complete; a changed requirement, pin or C
# file installs again.
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard src/triptych/native/*.[ch])

$(VENV)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[plot]'
	@touch $@

$(VENV)/.installed-dev: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[plot,dev,docs]'
	@touch $(VENV)/.installed $@
