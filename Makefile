# Every target sets up what it needs in .venv; a machine with Python (>= 3.10) is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# Tests wait much (for forks, mounts and limits): two at a time take little more than half as long.
# `make test JOBS=0` runs them one after the other, in one process.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --maxschedchunk 1

.PHONY: demo test check lint docs bench clean

$(STAMP):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(STAMP)  ## the main job on real images: train, be killed twice, resume, prove it exact
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## every test that this machine can run
	$(PYTEST)

check: $(STAMP)  ## the inner loop: fast tests and the linters
	$(PYTEST) -q -m "not slow"
	$(MAKE) lint

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

docs: $(STAMP)  ## HTML reference from the docstrings, into site/
	$(BIN)/python -m pip install --quiet --constraint constraints.txt '.[docs]'
	$(BIN)/mkdocs build --strict

bench: $(STAMP)  ## speed and memory against the peers, ratios in one run
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/save.py
	$(BIN)/python benchmarks/write.py
	$(BIN)/python benchmarks/load.py
	$(BIN)/python benchmarks/ddp.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/stream.py
	$(BIN)/python benchmarks/resume.py
	$(BIN)/python benchmarks/metrics.py

clean:
	rm -rf $(VENV) .demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis site
