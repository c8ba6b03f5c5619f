# `make run` and `make test` do everything on a fresh machine; `make` lists the targets.
VENV   ?= .venv
PYTHON ?= python3
PY      = $(VENV)/bin/python
STAMP   = $(VENV)/.installed
# Extra words for pip, such as an index that serves CPU builds of torch (docs/install.md).
PIP_ARGS ?=
RUN_ARGS ?=
TEST_ARGS ?=

.PHONY: help run test check format install golden sim clean slurm-packages test-slurm test-slurm-slice test-sglang test-gpu apptainer \
  harness-packages test-harness test-harness-slice test-sglang-slice
help:                       ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/  /' | column -t -l 2 -s '  ' 2>/dev/null || grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt tools/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" PIP_ARGS="$(PIP_ARGS)" sh tools/install.sh
	touch $@

install: $(STAMP)           ## virtual environment with everything pinned

run: $(STAMP)               ## the main job: gyre quickstart (RUN_ARGS="--steps 2" for a short one)
	$(VENV)/bin/gyre quickstart --fresh $(RUN_ARGS)

test: $(STAMP)              ## the whole default test suite
	$(PY) -m pytest -n 2 --dist worksteal $(TEST_ARGS)

SLURM_PACKAGES = slurm-wlm munge iproute2
SLURM_PYTEST   = GYRE_TEST_SLURM=1 $(PY) -m pytest -n 2 --dist worksteal -v --junitxml=slurm-report.xml

slurm-packages:
	command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES); }

test-slurm: $(STAMP) slurm-packages        ## every behaviour on a real Slurm of five nodes (as root; slurm-report.xml)
	$(SLURM_PYTEST) tests/slurm $(TEST_ARGS)

test-slurm-slice: $(STAMP) slurm-packages  ## the few of them that CI runs
	$(SLURM_PYTEST) -m slurm_slice tests/slurm $(TEST_ARGS)

SGLANG_VENV  ?= .venv-sglang
SGLANG_STAMP  = $(SGLANG_VENV)/.installed
$(SGLANG_STAMP): tools/sglang-cpu.sh tools/sglang-cpu.txt
	PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" sh tools/sglang-cpu.sh $(SGLANG_VENV)
	touch $@

# two runs: the first one's engines are gone before the second one's start, or 24 GB would not do
SGLANG_PYTEST = GYRE_ENGINE=sglang GYRE_SGLANG_PYTHON=$(abspath $(SGLANG_VENV)/bin/python) $(PY) -m pytest -n0 -v --timeout 900

test-sglang: test-sglang-slice  ## the engine contract, runs and mixtures of experts on the real SGLang, without a GPU
	$(SGLANG_PYTEST) tests/engine/test_sglang_experts.py $(TEST_ARGS)

test-sglang-slice: $(STAMP) $(SGLANG_STAMP)  ## of it, what CI runs: all but the mixtures
	$(SGLANG_PYTEST) tests/engine/test_contract.py tests/engine/test_sglang.py tests/trainer/test_transformers.py $(TEST_ARGS)

test-gpu: $(STAMP)          ## what only a GPU can show, in ten minutes; skipped, with the reason, where there is none
	$(PY) -m pytest -n0 -v -rs tests/gpu $(TEST_ARGS)

HARNESSES       = claude-code codex mini-swe-agent qwen-code opencode
HARNESS_SLICE   = claude-code mini-swe-agent
export GYRE_HARNESS_HOME ?= $(abspath .harnesses)
HARNESS_PYTEST  = GYRE_TEST_HARNESS=1 $(PY) -m pytest -n 2 -v --timeout 300 --junitxml=harness-report.xml

harness-packages:
	command -v npm >/dev/null && command -v bwrap >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs npm bubblewrap; }

test-harness: $(STAMP) harness-packages        ## the five real harnesses, with every trouble (harness-report.xml)
	$(VENV)/bin/gyre harness install $(HARNESSES)
	$(HARNESS_PYTEST) tests/harness $(TEST_ARGS)

test-harness-slice: $(STAMP) harness-packages  ## the two of them that CI runs
	$(VENV)/bin/gyre harness install $(HARNESS_SLICE)
	$(HARNESS_PYTEST) $(foreach name,$(HARNESS_SLICE),tests/harness/test_$(subst -,_,$(name)).py) $(TEST_ARGS)

check: $(STAMP)             ## format, lint, types, architecture
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy gyre_base cellctl proxyd trajtools celld gyre_exec gyre_cli bench
	$(PY) -m pytest -q tests/test_architecture.py

format: $(STAMP)            ## rewrite the format
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

golden: $(STAMP)            ## rewrite the transcript goldens; review the diff
	$(PY) -m pytest -q tests/cellctl/test_golden.py tests/cli/test_init.py tests/exec/test_command_lines.py --rewrite-golden

SEED ?= 7
sim: $(STAMP)               ## one seeded simulation of the scheduler with faults: make sim SEED=7
	$(PY) -m tests.cellctl.world $(SEED)

apptainer:                  ## Apptainer for its test, in .apptainer (as root on Debian)
	sh tools/apptainer.sh .apptainer

clean:                      ## remove the virtual environment and the runs
	rm -rf $(VENV) runs
