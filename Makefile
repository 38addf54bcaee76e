# Two commands do everything: `make demo` sets up and runs the main job, `make test` sets up and passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvexport-installed
DEMO ?= demo

.PHONY: demo test lint setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: setup
	$(BIN)/python -m kvexport.demo --out $(DEMO)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find plugins -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | xargs -r $(BIN)/clang-format --dry-run -Werror

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile

clean:
	rm -rf $(DEMO) build dist .pytest_cache .mypy_cache .ruff_cache
