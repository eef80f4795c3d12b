# make install | demo | test | test-all | lint | docs | bench | smoke | clean
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTEST := $(PY) -m pytest -n 2 --dist worksteal
# Tests of the mathematics, whose tolerances must hold for programs that are compiled as users' are,
# with this machine's vector instructions and with older ones.
NUMERIC := tests/test_mistakes.py tests/models $(addprefix tests/ops/test_,softmax.py \
  softmax_options.py distillation.py codes.py row_factory.py product.py quantize.py)
OPTIMISED := JAX_DISABLE_MOST_OPTIMIZATIONS=false XLA_FLAGS=--xla_cpu_max_isa
NATIVE := $(if $(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null),AVX512,AVX2)
OLDER := $(if $(filter AVX512,$(NATIVE)),AVX2) SSE4_2

.PHONY: install demo test test-all lint docs bench smoke clean

install: $(STAMP)

# Made again when the requirements change; otherwise a second call starts at once.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vqjax needs Python 3.11 or newer; '$(PYTHON)' is older: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once; a few minutes)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP)
	$(PY) -m experiments.demo

# Without the tests that are marked slow.
test: $(STAMP)
	$(PYTEST) -m "not slow"

# With run-time types, every mesh, several processes and the studies' smoke runs; and the mathematics as
# this machine computes it, and others without AVX-512 or AVX.
test-all: $(STAMP)
	VQJAX_RUNTIME_TYPES=1 $(PYTEST) $(addprefix --ignore=,$(NUMERIC))
	VQJAX_RUNTIME_TYPES=1 $(OPTIMISED)=$(NATIVE) $(PYTEST) $(NUMERIC)
	for isa in $(OLDER); do $(OPTIMISED)=$$isa $(PYTEST) -m "not slow" $(NUMERIC) || exit 1; done

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

# build/docs/index.html; the code of its pages is executed.
docs: $(VENV)/.docs
	$(PY) -m sphinx -W --keep-going -j 2 -b html docs build/docs

$(VENV)/.docs: $(STAMP)
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# make bench ARGS="--list", make bench ARGS="softmax heads --json bench.json": alone on the machine.
bench: $(STAMP)
	$(PY) -m experiments.bench $(ARGS)

# The demo's whole path in seconds.
smoke: $(STAMP)
	@rm -rf runs/smoke
	$(PY) -m experiments.demo --steps 12 --runs runs/smoke

clean:
	rm -rf $(VENV) .jax_cache runs build *.egg-info
