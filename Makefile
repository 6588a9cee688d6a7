# What a contributor runs, and what CI runs. `make help` lists it. ARGS goes to pytest: make test ARGS="-k probe -x"
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv venv-transformers4 demo test test-slow test-transformers4 quality style bench kernels clean

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
ARGS ?=
WORKERS ?= 2
# A file stays in one process, as its fixtures are dear; the order is the one of tests/conftest.py.
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
VENV := .venv
VENV4 := .venv-transformers4
BIN := $(VENV)/bin
SOURCES := normswap kernels tests tools examples benchmarks
# Threads that spin at a barrier take the core from the one they wait for: on a busy machine of two cores a forward pass
# of SmolLM2 took 6 to 9 s where it takes 1 s with threads that sleep.
demo test test-slow test-transformers4: export OMP_WAIT_POLICY ?= passive
# Images of Python set it. Here it makes each of the processes that tests start compile the package again.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := -m pip install --quiet --disable-pip-version-check
# Libraries that the tests try normswap on, out of everybody else's sight and without what they ask for: transformers prints
# warnings where it finds torchao, and beside the torchvision that timm asks for it does not import if that was built for
# another torch.
ASIDE := compressed-tensors einops fla-core hqq llmcompressor loguru termcolor timm torchao

help:  ## list the targets
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-26s %s\n", $$1, $$2 }'

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with $(PYTHON): a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[bench,demo,test,dev]'
	$(BIN)/python $(INSTALL) -c constraints.txt --no-deps --upgrade --target $(VENV)/aside $(ASIDE)
	@touch $@

$(VENV4)/.installed: pyproject.toml constraints-transformers4.txt
	@echo "Setting up $(VENV4) with $(PYTHON): a few minutes the first time"
	$(PYTHON) -m venv $(VENV4)
	$(VENV4)/bin/python $(INSTALL) -c constraints-transformers4.txt -e '.[demo,test]'
	@touch $@

venv: $(VENV)/.installed  ## the virtual environment, with the package installed from this tree

venv-transformers4: $(VENV4)/.installed  ## the one with the oldest supported transformers

demo: venv  ## convert a real SmolLM2-135M and compare the conversion with the original
	$(BIN)/python tools/demo.py

test: venv  ## all tests but the long sweeps, on WORKERS=2 processes
	$(BIN)/pytest $(SPREAD) -m "not slow" $(ARGS)

test-slow: venv  ## the long sweeps, on WORKERS=2 processes
	$(BIN)/pytest $(SPREAD) -m slow $(ARGS)

test-transformers4: venv-transformers4  ## the core tests, and the walk of all models, on the oldest supported transformers, on WORKERS=2 processes
	$(VENV4)/bin/pytest $(SPREAD) -m "core and (not slow or zoo)" $(ARGS)

quality: venv  ## lint, format check, types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

style: venv  ## mend what lint and format can mend
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: venv  ## every benchmark; each prints a table and writes JSON
	@set -e; for script in benchmarks/*.py; do echo "$(BIN)/python $$script"; $(BIN)/python "$$script"; done

kernels: venv  ## lay out kernels/build/ for the Hugging Face kernels loader
	$(BIN)/python tools/build_kernels.py

clean:  ## remove what was built; downloads and prepared checkpoints in .cache stay
	rm -rf $(VENV) $(VENV4) build dist kernels/build *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
