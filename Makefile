# `make train` and `make test` are all that a newcomer needs; both work on a fresh clone and again at once.
# Everything is installed into .venv, once: again only when pyproject.toml, setup.py, constraints.txt or a C file has changed.

PYTHON       ?= python3
TORCH        ?= $(shell sed -n 's/^torch==//p' constraints.txt)
TRAIN_FLAGS  ?= --data digits --model lenet --epochs 15 --global-batch-size 64 --workers auto
PYTEST_FLAGS ?=
CHAOS_FLAGS  ?= 1000
LOOP_CHAOS_FLAGS ?= 200
HOST_CHAOS_FLAGS ?= 200
SCHEDULE_FLAGS ?= 20000
# processes that run tests: one more than there are cores, because most tests wait for processes of their own
TEST_PROCESSES ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PIP_FLAGS    ?=
GPU_FLAGS    ?=
RELEASE_FLAGS ?=

VENV  := .venv
BIN   := $(VENV)/bin
LOG   := $(VENV)/install.log
C     := $(wildcard src/lockstep/transports/shm/*.[ch] src/lockstep/flight_recorder/*.c)
DEMO  := $(VENV)/.ready-demo
TESTS := $(VENV)/.ready-test
DOCS  := $(VENV)/.ready-docs
CLUSTER := $(VENV)/.ready-cluster
RELEASE := $(VENV)/.ready-release

# What pip writes when it cannot reach an index, and what it then takes to be wrong instead.
NO_NETWORK := Could not fetch URL .*(connection error|timed out)|NewConnectionError|NameResolutionError|ProxyError
NO_NETWORK := $(NO_NETWORK)|ConnectTimeout|ReadTimeout|ConnectionReset|SSLError|Network is unreachable
MISTAKEN   := Could not find a version|No matching distribution|Cannot install .* conflicting dependencies
MISTAKEN   := $(MISTAKEN)|ResolutionImpossible|subprocess-exited-with-error|installing build dependencies

.DEFAULT_GOAL := help
.PHONY: help train test test-cluster gpu-check lint types layers public-names docs chaos bench-check release-check clean distclean

help: ## show this list
	@echo "make train    install, then train LeNet on handwritten digits (TRAIN_FLAGS=... for other options)"
	@echo "make test     install what the tests need, then run them all (PYTEST_FLAGS=... for pytest)"
	@echo "make test-cluster  install Slurm (apt) and Ray where they are missing, and run the tests with real ones; a quarter of an hour"
	@echo "make gpu-check  on a host with a GPU: the tests, examples and measurements there, in nine minutes; PYTHON=... is one"
	@echo "              with a build of torch with CUDA (nothing is installed; GPU_FLAGS=... for options)"
	@echo "make lint     check style and formatting (ruff)"
	@echo "make types    check types (mypy, strict)"
	@echo "make layers   check which module imports which (docs/architecture.md)"
	@echo "make public-names  write docs/api/names.md and docs/variables.md anew, after a change of public names that is meant"
	@echo "make docs     build the documentation as a site, in site/index.html"
	@echo "make chaos    train elastic jobs under random faults: 1000 of workers, 400 with loops of their own, 200 of hosts,"
	@echo "              20000 simulated ones (CHAOS_FLAGS=..., LOOP_CHAOS_FLAGS=..., HOST_CHAOS_FLAGS=..., SCHEDULE_FLAGS=...)"
	@echo "make bench-check  run every benchmark with --quick, and say which no longer work; a quarter of an hour"
	@echo "make release-check  build the distributions, install each into a new environment and try it there; nothing is uploaded"
	@echo "              (RELEASE_FLAGS=... for options, PIP_FLAGS=... for those of pip)"
	@echo "make clean    remove caches and build output; make distclean removes .venv as well"
	@echo "TEST_PROCESSES=...  the number of processes that run tests (now: $(TEST_PROCESSES))"
	@echo "PYTHON=...    the Python that .venv is made with, 3.10 or newer (now: $(PYTHON))"
	@echo "TORCH=...     the version of torch in a new .venv (now: $(TORCH)); after another one: make distclean"

train: $(DEMO)
	@$(BIN)/lockstep train $(TRAIN_FLAGS)

# Of the simulated schedules of job trees (tests/unit/launcher/test_job_schedules.py) 3,000 are tried, as 5,000 take more than
# a minute; make chaos tries 20,000.
test: $(TESTS)
	@$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

# A Slurm of two nodes on this host and clusters of Ray, which are gone afterwards; the daemons of Debian's package are not
# started. What is not installed is skipped with its reason.
test-cluster: $(CLUSTER)
	@missing=; for each in slurmctld slurmd munged; do \
	    PATH=$$PATH:/usr/sbin:/sbin command -v $$each > /dev/null || missing="$$missing $$each"; done; \
	if [ -n "$$missing" ]; then \
	    sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	    echo "Installing$$missing (apt-get install slurm-wlm munge) ..."; \
	    { $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
	        apt-get install -qq -y --no-install-recommends slurm-wlm munge; } > $(VENV)/apt.log 2>&1 || { \
	        tail -n 3 $(VENV)/apt.log >&2; \
	        echo "error: Slurm could not be installed; $(VENV)/apt.log says why." >&2; \
	        echo "       Install slurmctld, slurmd and munged yourself, then run it again." >&2; exit 1; }; \
	fi
	@OMP_NUM_THREADS=1 $(BIN)/pytest tests/cluster -rs $(PYTEST_FLAGS)

# with a Python that has torch already: builds of torch with CUDA are large, and fit a driver
gpu-check:
	@PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) benchmarks/gpu/check.py $(GPU_FLAGS)

lint: $(TESTS)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(TESTS)
	@$(BIN)/mypy
	@MYPYPATH=src:benchmarks:tests $(BIN)/mypy benchmarks/*.py packaging/*.py
	@MYPYPATH=src:benchmarks:benchmarks/gpu $(BIN)/mypy benchmarks/gpu/*.py

# some 1,600 elastic jobs with random faults; an hour or two
chaos: $(TESTS)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/support/elastic_chaos.py $(CHAOS_FLAGS)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/support/own_loop_chaos.py $(LOOP_CHAOS_FLAGS)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/support/own_loop_chaos.py $(LOOP_CHAOS_FLAGS) --prepare
	@OMP_NUM_THREADS=1 $(BIN)/python tests/support/launcher_chaos.py $(HOST_CHAOS_FLAGS)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/support/job_simulation.py $(SCHEDULE_FLAGS)

# -q twice leaves out pytest's count, so that the last one seen in CI is that of all tests
layers: $(TESTS)
	@$(BIN)/pytest -q tests/unit/test_layers.py
	@echo "Every module keeps to its layer."

public-names: $(TESTS)
	@$(BIN)/python packaging/public_names.py
	@$(BIN)/python packaging/variables_page.py
	@echo "Write a line for each change of docs/api/names.md into CHANGELOG.md."

# Their figures say nothing in such a run, which tells only what has changed under a benchmark since it was run last.
bench-check: $(TESTS)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quick.py

# Three new environments with a torch each: minutes. --also PYTHON is a further one that is to load the compiled part.
release-check: $(RELEASE)
	@$(BIN)/python packaging/release_check.py $(RELEASE_FLAGS) -- $(PIP_FLAGS)

# Mkdocs is quiet but for what is wrong, and fails then; so is the check, which searches the site as its pages do.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@$(BIN)/python packaging/site_check.py
	@echo "The documentation is in site/index.html. To search in it: python -m http.server --directory site"

clean:
	@rm -rf build dist site src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)

# Each file stands for an installed extra. What the tests need includes what the demonstration needs.
# pip says that the network is at fault when it tries again. Bytecode is written for what is imported, not for all
# 13,000 files, which takes pip more than a minute.
$(DEMO) $(TESTS) $(DOCS) $(CLUSTER) $(RELEASE): $(VENV)/.ready-%: pyproject.toml setup.py constraints.txt $(C) | $(BIN)/python
	@echo "Installing Lockstep with extra '$*' into $(VENV); the first time this takes minutes (log: $(LOG)) ..."
	@rm -f src/lockstep/*/_native.*.so src/lockstep/*/*/_native.*.so # of another version of Python, which would come before the new one
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --retries 3 --no-compile $(PIP_FLAGS) -c $(VENV)/constraints.txt -e '.[$*]' > $(LOG) 2>&1 || { \
	    said=$$(grep -iE '^ *error:' $(LOG) | grep -vE '$(MISTAKEN)' | cut -c 1-200 | tail -n 5); \
	    if [ -z "$$said" ] && grep -qE '$(NO_NETWORK)' $(LOG); then \
	        echo "error: packages could not be downloaded: the package index cannot be reached." >&2; \
	        echo "       Check the network (or the proxy settings of pip), then run the same command again." >&2; \
	    else \
	        { grep -iE '^ *error:' $(LOG) || tail -n 5 $(LOG); } | cut -c 1-200 | tail -n 5 >&2; \
	        echo "error: pip could not install Lockstep; $(LOG) says why." >&2; \
	        echo "       Put that right, then run the same command again." >&2; \
	    fi; exit 1; }
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import torch.distributed, torch._dynamo, lockstep.cli, lockstep.training'
	@touch $@ $(if $(filter $(TESTS),$@),$(DEMO))

$(BIN)/python:
	@found=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null \
	    || "$(PYTHON)" --version 2>&1); \
	set -- $$(echo "$$found" | sed -n 's/^[^0-9]*\([0-9][0-9]*\)\.\([0-9][0-9]*\).*/\1 \2/p'); \
	if [ $$# -ne 2 ]; then \
	    echo "error: $(PYTHON) is not a Python that can be run." >&2; \
	    echo "       Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; \
	elif [ $$1 -lt 3 ] || { [ $$1 -eq 3 ] && [ $$2 -lt 10 ]; }; then \
	    echo "error: Lockstep needs Python 3.10 or newer; $(PYTHON) is Python $$1.$$2." >&2; \
	    echo "       Install a newer one, or name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; \
	elif ! "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "error: $(PYTHON) cannot make virtual environments: its module venv or ensurepip is missing." >&2; \
	    echo "       On Debian and Ubuntu: apt install python3-venv (or python$$1.$$2-venv). Then run it again." >&2; \
	    exit 1; \
	elif ! said=$$("$(PYTHON)" -m venv --clear $(VENV) 2>&1); then \
	    rm -rf $(VENV); echo "$$said" | tail -n 5 >&2; \
	    echo "error: $(PYTHON) could not make a virtual environment in $(VENV); the lines above say why." >&2; exit 1; \
	fi
