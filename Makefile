# make demo: train on embedded real records.  make test: run the tests.  Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.PHONY: demo test test-slow lint types imports benchmarks clean

demo: $(INSTALLED)
	$(BIN)/silodp demo --out runs/demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -rs

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -rs -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

benchmarks: $(INSTALLED)
	$(BIN)/python benchmarks/run.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "silodp needs Python 3.11 or later: run make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
