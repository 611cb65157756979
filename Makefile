# `make demo` shows what it does, `make test` runs everything; both set up what they need in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.test-installed
BENCHMARKS := benchmarks/results.md

# one that runs: a name on the path may be a launcher without a Python behind it
python_of = $(shell python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null)

# what pip did not compile is compiled once, where it is imported first: not again in each command that a test starts
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test tests conformance bench reliability guided versions check lint types format docs gallery clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(INSTALLED)  ## analyze sample_data, print the summary, write demo/report.html
	$(BIN)/mismatchctl demo

test: $(TEST_INSTALLED)  ## lint, types, and every test
	$(MAKE) lint
	$(MAKE) --jobs 2 --keep-going types tests  # types take a processor for a minute, while workers start and where one is done early

tests: $(TEST_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "" -n auto  # a worker has one processor

conformance: $(TEST_INSTALLED)  ## every number of the frameworks' own code against ours, a line per version
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

reliability: $(TEST_INSTALLED)  ## 20,000 fuzz cases, 1,000 kills, faults of the machine, into docs/methods/reliability.md
	$(BIN)/python -m tests.reliability.reliability --write docs/methods/reliability.md

guided: $(TEST_INSTALLED)  ## fuzz the parsers guided by coverage, with atheris
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.reliability.guided 100000

versions: $(TEST_INSTALLED)  ## a part of the tests with each Python that is there, and with the oldest dependencies
	$(BIN)/python -m tests.reliability.versions $(foreach v,3.10 3.11 3.12 3.13,$(call python_of,$(v))) --oldest $(firstword $(foreach v,3.10 3.11 3.12 3.13,$(call python_of,$(v))))

check: lint types  ## lint, format, types

lint: $(TEST_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST_INSTALLED)
	$(BIN)/mypy

format: $(TEST_INSTALLED)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(TEST_INSTALLED)  ## write the reference pages from the code and build the site in site/
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pictures.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

gallery: $(TEST_INSTALLED)  ## draw the figures of docs/guides/reports.md from sample_data
	$(BIN)/python docs/gallery.py

clean:  ## remove what the other targets made
	rm -rf $(VENV) demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(TEST_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $(INSTALLED) $@
