# `make demo` shows a report, and `make test` runs all checks. Both create $(VENV) first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.test-installed
BENCHMARKS := benchmarks/results.md

# path of a Python that really starts, since some launchers on the PATH have no Python
python_of = $(shell python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null)

# keep bytecode: pip installs without it, and each process of the tests would compile all modules again
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test tests conformance bench reliability guided versions check lint types format docs gallery clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

demo: $(INSTALLED)  ## analyze sample_data and write demo/report.html
	$(BIN)/mismatchctl demo

test: $(TEST_INSTALLED)  ## lint, check types, and run all tests
	$(MAKE) lint
	$(MAKE) --jobs 2 --keep-going types tests  # mypy uses idle time of the test workers

tests: $(TEST_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "" -n auto  # one core per worker

conformance: $(TEST_INSTALLED)  ## compare all numbers with the frameworks' own code, by version
	$(BIN)/python -m tests.conformance.compare_verl
	$(BIN)/python -m tests.conformance.compare_slime
	$(BIN)/python -m tests.conformance.compare_peers

bench: $(TEST_INSTALLED)  ## measure speed and memory, write benchmarks/results.md
	$(BIN)/python benchmarks/analyze.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/memory.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/sweep.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/device.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/cluster.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/formats.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/recorder.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/weights.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/baselines.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/pairs.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/pages.py --write $(BENCHMARKS)
	$(BIN)/python benchmarks/third_column.py --tokens 30e6 --write $(BENCHMARKS)

reliability: $(TEST_INSTALLED)  ## run 20,000 fuzz cases, 1,000 kills and machine faults, write docs/methods/reliability.md
	$(BIN)/python -m tests.reliability.reliability --write docs/methods/reliability.md

guided: $(TEST_INSTALLED)  ## fuzz the parsers with atheris, guided by coverage
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.reliability.guided 100000

versions: $(TEST_INSTALLED)  ## run some tests with each installed Python, and with the oldest dependencies
	$(BIN)/python -m tests.reliability.versions $(foreach v,3.10 3.11 3.12 3.13,$(call python_of,$(v))) --oldest $(firstword $(foreach v,3.10 3.11 3.12 3.13,$(call python_of,$(v))))

check: lint types  ## check lint, format and types

lint: $(TEST_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST_INSTALLED)
	$(BIN)/mypy

format: $(TEST_INSTALLED)  ## fix lint and format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(TEST_INSTALLED)  ## write the reference pages from the code, build site/
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pictures.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

gallery: $(TEST_INSTALLED)  ## draw the figures of docs/guides/reports.md from sample_data
	$(BIN)/python docs/gallery.py

clean:  ## delete the output of the other targets
	rm -rf $(VENV) demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(TEST_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $(INSTALLED) $@
