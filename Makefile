# Everything a person does with this repository. `make` alone prints the list.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
SERVICES := $(foreach name,$(notdir $(wildcard services/*)),services/$(name)/fleet_$(name))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

help:  ## This list
	@grep -hE '^[a-z-]+%?:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(BIN)/python:
	@echo "creating $(VENV)"
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is needed: $(PYTHON) was not found (set PYTHON=...)"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# One stamp per lock: an install runs again only when its lock or pyproject.toml changed.
$(VENV)/.installed-%: requirements/%.txt requirements/torch.txt pyproject.toml | $(BIN)/python
	@echo "installing torch (CPU or CUDA build, whichever this machine offers)"
	@$(PIP) install -r requirements/torch.txt
	@echo "installing requirements/$*.txt (locked by hash, $$(grep -c == requirements/$*.txt) packages)"
	@$(PIP) install --require-hashes --no-deps -r requirements/$*.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q contracts libs services models
	@touch $@

setup: $(VENV)/.installed-dev  ## Create .venv with everything for run, check, test and bench

run: $(VENV)/.installed-local  ## Start a whole fleet here (FLEET_HTTP_PORT moves the port); Ctrl-C drains it
	@exec $(BIN)/fleet up

check: setup  ## Lint, types, import rules, drift of contracts and locks
	@$(BIN)/ruff format --check -q .
	@$(BIN)/ruff check -q .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache 2>&1 | tail -n 20; exit $${PIPESTATUS[0]}
	@$(BIN)/python contracts/generate.py --check
	@$(BIN)/python requirements/lock.py --check

test: setup test-unit test-integration test-e2e  ## All tests: unit, integration (real servers), end to end (real models)

test-unit: setup  ## Unit tests: no network, no torch, under 30 s
	$(BIN)/python -m pytest -n logical --dist worksteal -m "not integration and not e2e and not models"

test-integration: setup  ## Against a real nats-server and every network store
	@deploy/install-mooncake-libs.sh
	$(BIN)/python -m pytest -n logical --dist loadfile tests/integration

test-e2e: setup  ## Real models, whole fleets, faults
	$(BIN)/python -m pytest -m models contracts/tests libs models/tests services
	$(BIN)/python -m pytest tests/e2e tests/faults

contracts: setup  ## Write contracts/schemas and contracts/golden from the structs
	@$(BIN)/python contracts/generate.py

freeze-%: setup  ## Keep release % (the commit that is checked out) as what the next one must work beside
	@$(BIN)/python contracts/generate.py --freeze $*
	@git archive HEAD contracts/fleet_contracts libs/common/fleet_common $(SERVICES) | xz -9 > tests/releases/omnifleet-$*.tar.xz

lock: setup  ## Resolve requirements/*.txt again
	@$(BIN)/python requirements/lock.py

bench: setup  ## Every figure; build/bench.json (a part: make bench-NAME)
	@$(BIN)/python -m loadtests.bench

bench-%: setup
	@$(BIN)/python -m loadtests.bench $*

train-vision: setup  ## Train the vision tower and the adapter again (seeded, an hour on two cores; goes on where it stopped)
	@$(PIP) install --require-hashes --no-deps -r requirements/fonts.txt
	@$(BIN)/python -m fleet_models.train_language --seed 0 --out models/weights & language=$$!; \
	$(BIN)/python -m fleet_models.train_vision --seed 0 --out models/weights && wait $$language

train-diffusion: setup  ## Train the image model again (seeded; run it again to go on after a stop)
	@$(BIN)/python -m fleet_models.train_diffusion --seed 0 --out models/weights/image --state build/diffusion

.PHONY: help setup run check test test-unit test-integration test-e2e contracts lock bench train-vision train-diffusion
