# Everything runs in .venv, which is built when it is missing or older than pyproject.toml or constraints.txt.
#
#   make demo                      train a small network on handwritten digits, certify it, and write its page
#   make test                      the suite, on all cores; ARGS goes to pytest:
#   make test ARGS="tests/test_geometry.py -x -n 0"
#   make test-all                  with the slow tests
#   make check                     ruff (lint and format) and mypy; make format mends what ruff can
#   make docs                      the pages, strict, into site/
#   make test-oldest               the suite on the oldest versions that are supported, in .venv-oldest
#   make results DATA=../shared/data
#                                  the paper's figures and tables again, in hours on two cores, from the folder
#                                  cifar-10-batches-bin and the MobileNetV2 under weights; repeat it after a kill
#
# PYTHON=python3.12 names the interpreter. TORCH="torch==2.11.0" VENV=.venv-2.11 makes an environment with another torch
# (a VENV of its own, since one that exists is not rebuilt for it). pip's own settings (PIP_INDEX_URL, ...) are honoured.

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
CONSTRAINTS ?= constraints.txt
TORCH ?= $(shell grep '^torch' $(CONSTRAINTS))
ARGS ?=
DATA ?= ../shared/data

RUN := $(VENV)/bin/python
PINS := $(VENV)/constraints.txt
PIP := $(RUN) -m pip --disable-pip-version-check

.PHONY: help demo results test test-all test-oldest check format docs clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.lab
	$(RUN) -m opnorm train --out runs/demo --overwrite --radii 0.05 0.1
	$(RUN) -m opnorm eval runs/demo
	@echo "open runs/demo/page.html in a browser: curves, certificate, norms, mistakes"

# It goes on where it was killed. ARGS="--out runs/again --docs runs/again" leaves the committed results as they are.
results: $(VENV)/.sweep
	$(RUN) -m opnorm reproduce all --profile small --data-path $(DATA)/cifar-10-batches-bin \
	--weights $(DATA)/weights/mobilenetv2_torchvision_bnfolded.safetensors $(ARGS)

test: $(VENV)/.dev
	$(RUN) -m pytest -n auto $(ARGS)

test-all: $(VENV)/.dev
	$(RUN) -m pytest -n auto --runslow $(ARGS)

# Downloads about 3.5 GB where the package registry has no CPU build of an old torch; see CONTRIBUTING.
test-oldest:
	$(MAKE) test VENV=$(OLDEST) CONSTRAINTS=constraints-oldest.txt

check: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/.dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.dev
	$(RUN) -m mkdocs build --strict

clean:
	rm -rf .venv* .mypy_cache .pytest_cache .ruff_cache .hypothesis site dist

# torch comes first and alone, so that no other package has a say in which build of it is installed, and the pins go to
# every later call of pip, so that none replaces it.
$(PINS): $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("opnorm needs Python 3.11 or later, got " + \
	sys.version.split()[0] + "; name another: make PYTHON=python3.11")'
	@echo "building $(VENV) with $(TORCH); this takes a few minutes, once"
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	{ echo '$(TORCH)'; grep -v '^torch' $(CONSTRAINTS) || true; } > $@
	$(PIP) install -q '$(TORCH)'

$(VENV)/.lab: pyproject.toml $(PINS)
	$(PIP) install -q -c $(PINS) -e '.[lab]'
	@touch $@

$(VENV)/.sweep: pyproject.toml $(PINS)
	$(PIP) install -q -c $(PINS) -e '.[lab,sweep]'
	@touch $@ $(VENV)/.lab

$(VENV)/.dev: pyproject.toml $(PINS)
	$(PIP) install -q -c $(PINS) -e '.[lab,sweep,bench,docs,dev]'
	@touch $@ $(VENV)/.lab $(VENV)/.sweep
