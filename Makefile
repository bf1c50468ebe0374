# Everything here runs on a machine with python3 (3.10 or newer) and make: the tools come into .venv.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-input
WORKERS ?= 2

# Small matrices, and workers that share the cores: more BLAS threads would only wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

# A half-made environment has no stamp and is made anew; so is one whose Python has gone.
$(shell $(PY) -c "import pip" >/dev/null 2>&1 || rm -f $(VENV)/.ready*)

.PHONY: demo test lint soak clean

demo: $(VENV)/.ready-for-demo
	@$(ONE_THREAD) $(PY) -m minidnn train smallnet --data digits --batch 32 --epochs 10 --lr 0.05 --schedule cosine \
		--device host
	@mkdir -p out
	@$(ONE_THREAD) $(PY) -m minidnn compare smallvgg --data digits --batch 64 --device host --check --html out/compare.html
	@$(PY) -m minidnn simulate vgg16 --batch 64 --gpu gtx1080ti --check --html out/simulate.html
	@echo "reports: out/compare.html and out/simulate.html"

test: lint
	@$(ONE_THREAD) $(PY) -m pytest -q -n $(WORKERS) -m "not soak"

lint: $(VENV)/.ready-for-tests
	@$(PY) -m ruff check --quiet .
	@$(PY) -m mypy --strict

soak: $(VENV)/.ready-for-tests
	@$(ONE_THREAD) HYPOTHESIS_PROFILE=soak $(PY) -m pytest -q -n $(WORKERS)

clean:
	@rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*

$(VENV)/.ready: pyproject.toml
	@echo "Setting up $(VENV) (once; needs the network) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "minidnn needs Python 3.10 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) \
		|| { echo "python3 cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PIP) -e .
	@touch $@

$(VENV)/.ready-for-demo: $(VENV)/.ready
	@$(PIP) -e ".[plot]"
	@touch $@

$(VENV)/.ready-for-tests: $(VENV)/.ready
	@echo "Installing what the tests need ..."
	@$(PIP) -e ".[dev,plot,images,parity]"
	@touch $@
