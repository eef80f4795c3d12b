# What can I run here?  make demo | test | lint | bench | bench-vq | bench-dpq | bench-grouped | bench-gpu | install | smoke | clean
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: install demo test lint bench bench-vq bench-dpq bench-grouped bench-gpu smoke clean

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

test: $(STAMP)
	$(PY) -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

bench: $(STAMP)
	$(PY) -m experiments.bench.softmax
	$(PY) -m experiments.bench.options
	$(PY) -m experiments.bench.memory
	$(PY) -m experiments.bench.heads
	$(PY) -m experiments.bench.loop

# At the sizes of the VQ-Logits paper: an hour on two cores, alone on the machine.
bench-vq: $(STAMP)
	$(PY) -m experiments.bench.kmeans
	$(PY) -m experiments.bench.codebook

# On two cores a quarter of an hour, alone on the machine.
bench-dpq: $(STAMP)
	$(PY) -m experiments.bench.quantized_embedding

# On two cores half an hour, alone on the machine; on a GPU with more widths timed.
bench-grouped: $(STAMP)
	$(PY) -m experiments.bench.grouped $(ARGS)

# On any machine with a GPU, jax for it, flax and jaxtyping; nothing of this repository installed:
# make bench-gpu PY=python3 ARGS="--json gpu.json"
bench-gpu:
	@py=$(PY); command -v $$py > /dev/null || py=$(PYTHON); \
	  PYTHONPATH=. $$py -m experiments.bench.gpu $(ARGS)

# The demo's whole path in seconds, to see that it works.
smoke: $(STAMP)
	@rm -rf runs/smoke
	$(PY) -m experiments.demo --steps 12 --runs runs/smoke

clean:
	rm -rf $(VENV) runs build *.egg-info
