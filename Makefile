# Two commands: `make demo` and `make test`. PYTHON chooses the interpreter the virtual environment is made from.
PYTHON ?= python3
BIN := .venv/bin
export EDGEKV_REQUIRE_MODELS := 1
PYTEST := $(BIN)/python -m pytest -n logical --dist worksteal
QUICK := tests/pure --ignore tests/pure/test_catalog.py --ignore tests/pure/test_cli_frame.py \
	$(patsubst %,tests/native/test_%.py,compact faults forks generation kinds markup new_text park positions save window)

.PHONY: help setup demo test test-quick test-all lint format bench models clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

setup: .venv/.ready ## build llama.cpp and install edgekv into .venv

.venv/.ready: pyproject.toml scripts/build_llama.py scripts/llama-only.cmake
	$(PYTHON) -m venv .venv
	$(BIN)/python scripts/build_llama.py
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: setup ## mask-and-continue against restart, on SmolLM2, and a short report.html
	$(BIN)/edgekv demo
	@echo && echo "A short comparison of more arms, with charts:"
	@$(BIN)/edgekv compare --arms mask,isolated --cases 5 --compared 5 --repeat 4 --suffix 32,128 --span 192 --html report.html > /dev/null

test: setup models ## the whole test suite, real models included
	$(PYTEST) -m 'not slow'

test-quick: setup ## what is tested in half a minute, without real models or many processes
	$(PYTEST) -m 'not slow and not real' -k 'not made_to_hurt' $(QUICK)

test-all: setup models ## longer tiers and random examples too
	HYPOTHESIS_PROFILE=nightly $(PYTEST)

lint: setup ## ruff and mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: setup models ## paired timings against bare llama.cpp, of forks, of files, of a long chat; writes bench*.json
	$(BIN)/python scripts/bench.py --json bench.json
	$(BIN)/python scripts/bench_verbs.py --json bench-verbs.json
	$(BIN)/python scripts/bench_files.py --json bench-files.json
	$(BIN)/edgekv bench chat --json bench-chat.json --plot bench-chat.html

models: setup ## fetch the two models into models/
	$(BIN)/edgekv models fetch smollm2 && $(BIN)/edgekv models fetch gemma3-270m

clean: ## remove what was built here; fetched models stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis bench.json bench-verbs.json bench-files.json bench-chat.json bench-chat.html report.html
