# make train   trains a language model with CAME under ZeRO stage 2 (the main job)
# make test    runs the tests and the doctests, without the slow ones and those of scripts
# make test-all runs all tests and notebooks
# make mutations plants known faults, one by one, and runs the tests that should see them
# make programs compares compiled programs and training traces with those that are recorded
# make check   checks style and types, and runs the tests of the files that differ from main
# make lint    checks style, types, and the lengths of pages and sentences
# make compare trains with CAME, Adafactor and AdamW, and draws their losses
# make pictures draws those of README.md and docs/ from benchmarks/results/
# make bench   measures optimizer and training steps on this machine, into benchmarks/results/
# make bench-gpu measures them on a GPU, with the jax that PYTHON has
# make check-gpu does in 12 minutes what is worth most on one GPU, as long as each of its parts may
#              take; SMOKE=--smoke runs the same parts in small, on any device
# make test-gpu runs the tests of what only a GPU can show, and those of optimizers, with that jax
# make evidence runs the heart of the comparison of optimizers again, and draws its report
# make evidence-long runs what is missing of the studies of long runs: one core, for days
# make evidence-gpu trains GPT-2 small on a GPU for 8 minutes; again until all runs are there
# make docs    builds the documentation site into docs/_build/html/
# make wheel   builds the distribution into dist/
#
# Each installs what it needs into .venv. PYTHON names the interpreter to make it with.

PYTHON ?= python3
BIN := .venv/bin
GPU := XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=. timeout
# JAX's wheels for the accelerators that this machine shows.
ACCELERATOR := $(shell if nvidia-smi -L >/dev/null 2>&1; then echo ,cuda; \
                       elif ls /dev/accel0 /dev/vfio/0 >/dev/null 2>&1; then echo ,tpu; fi)

.PHONY: train test test-all mutations programs check lint compare pictures bench bench-gpu check-gpu test-gpu evidence evidence-long evidence-gpu docs wheel clean

train: .venv/examples
	$(BIN)/python examples/train_lm.py

compare: .venv/examples
	$(BIN)/python examples/train_lm.py --compare came,adafactor,adamw --name compare
	$(BIN)/python benchmarks/state_bytes.py

pictures: .venv/examples
	$(BIN)/python docs/pictures.py

bench: .venv/examples
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/training_step.py
	! $(BIN)/python -c 'import libtpu, jax_cuda13_plugin' 2>/dev/null || \
		{ $(BIN)/python benchmarks/step_bytes.py && \
		$(BIN)/python benchmarks/zero_memory.py; }

# Where jax is installed with its GPU wheels already, PYTHON runs it as it is.
bench-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/step_time.py --platform gpu
	PYTHONPATH=. $(PYTHON) benchmarks/training_step.py --platform gpu
	PYTHONPATH=. $(PYTHON) benchmarks/one_gpu.py
	PYTHONPATH=. $(PYTHON) benchmarks/one_gpu.py --report

# The rates of check --measure have products of fp8; cases 16, 3 and 4 are QLoRA, CAME and AdamW in
# 8 bits. What fails is reported, and the next part runs, but for a machine that computes wrongly.
check-gpu:
	mkdir -p runs
	$(GPU) 150 $(PYTHON) -m sharding check $(if $(SMOKE),--match dynamic)
	-$(GPU) 120 $(PYTHON) -m sharding check $(if $(SMOKE),--match linear,--measure runs/machine.json)
	-$(GPU) 240 $(PYTHON) benchmarks/activation_time.py $(or $(SMOKE),--minutes 2 --rounds 10)
	-$(GPU) 180 $(PYTHON) benchmarks/one_gpu.py $(or $(SMOKE),--minutes 1 --cases 16 3 4)

test-gpu:
	TEST_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=. \
		$(PYTHON) -m pytest -p no:benchmark -n 12 tests/test_on_gpu.py tests/optax_ext

evidence: .venv/examples
	JAX_PLATFORMS=cpu $(BIN)/python benchmarks/convergence/evidence.py

evidence-long: .venv/examples
	JAX_PLATFORMS=cpu $(BIN)/python benchmarks/convergence/length_study.py
	JAX_PLATFORMS=cpu $(BIN)/python benchmarks/convergence/report.py

evidence-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/convergence/gpt2_small.py --minutes 8

test: .venv/test
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test-all: .venv/test
	$(BIN)/python -m pytest -m "" -n auto --maxprocesses 8 --dist worksteal

mutations: .venv/test
	$(BIN)/python tests/mutations.py

programs: .venv/test
	$(BIN)/python tests/programs.py --check

check: lint .venv/test
	$(BIN)/python tests/changed.py -n auto --maxprocesses 8 --dist worksteal

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/prose.py

docs: .venv/docs
	$(BIN)/sphinx-build --jobs auto --quiet --fail-on-warning --keep-going docs docs/_build/html
	! find docs/_build/html -name '*.html' -size +300k | grep .
	! command -v node || node docs/_ext/lookups.js docs/_build/html
	@echo "The site is docs/_build/html/index.html"

wheel: .venv/wheel
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv dist runs docs/_build .jax_cache .pytest_cache .mypy_cache .ruff_cache

# One stamp for each set of dependencies, remade when what they depend on changes.
.venv/examples: EXTRAS = [examples$(ACCELERATOR)]
.venv/test: EXTRAS = [test$(ACCELERATOR)]
.venv/lint: EXTRAS = [test,lint]
.venv/docs: EXTRAS = [docs]
.venv/wheel: EXTRAS = [wheel]
.venv/examples .venv/test .venv/lint .venv/docs .venv/wheel: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.$(EXTRAS)'
	@touch $@

# Some systems ship Python without ensurepip; virtualenv brings its own.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "optax-ext needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv .venv || \
		($(PYTHON) -m pip install --user virtualenv && $(PYTHON) -m virtualenv .venv)
