# make demo    train a model with four peers on this machine, one command from a fresh clone
# make test    the tests; installs what they need into .venv first
# make check   format, lint, types, import layers, generated files
# make bench   the figures in docs/benchmarks.md, against their peers (about an hour and a half; a quiet machine)
# make chaos   real processes killed and frozen, the long form
# make sim     a simulated swarm, hours long, with everything going wrong: make sim SEED=7 [PEERS=200 HOURS=2 SCENARIO=storm]
# make proto   regenerate swarm/wire from proto/
# make docs    the documentation as a site in build/docs; needs no network once its tools are installed
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

DOCS_OUT ?= build/docs

.PHONY: docs help demo test check format proto bench bench-quick chaos chaos-quick sim sim-quick install install-dev install-docs clean

help:
	@sed -n 's/^# //p' Makefile | head -8

# The stamps hold what was installed: a change of pyproject.toml or constraints.txt installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing swarm and what it needs (torch is the large one; minutes at first, cached afterwards)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what tests and checks need"
	@$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what the documentation needs"
	@$(PIP) -e '.[docs]'
	@touch $@

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

install-docs: $(VENV)/.installed-docs

demo: install
	@$(BIN)/swarm demo $(ARGS)

test: install-dev
	$(BIN)/python -m pytest -m "not chaos and not slow" $(ARGS)

chaos: install-dev
	$(BIN)/python -m pytest -m "chaos" $(ARGS)

chaos-quick: install-dev
	$(BIN)/python -m pytest -m "chaos" -k "(in_the_middle and 0.1) or (outlive and not long)" $(ARGS)

SEED ?= 1
PEERS ?= 200
HOURS ?= 2
SCENARIO ?= storm

sim: install-dev
	@$(BIN)/python -m swarm.testing.scenarios --seed $(SEED) --peers $(PEERS) --hours $(HOURS) --scenario $(SCENARIO) $(ARGS)

sim-quick:
	@$(MAKE) --no-print-directory sim PEERS=40 HOURS=0.2

check: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PYTHON=$(BIN)/python bash proto/generate.sh --check

format: install-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: install-dev
	PYTHON=$(BIN)/python bash proto/generate.sh

bench: install-dev
	$(BIN)/python -m benchmarks $(ARGS)

bench-quick: install-dev
	$(BIN)/python -m benchmarks --quick $(ARGS)

docs: install-docs
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs $(DOCS_OUT)
	@echo "the documentation is in $(DOCS_OUT)/index.html"

clean:
	rm -rf $(VENV) .venv-hivemind build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
