# Two commands do all their own set-up on a machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SEED ?= 1

export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint types tests soak nightly bench clean

demo: $(READY)
	$(BIN)/python -m stagewright demo

test: lint types tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Unit tests two at a time; those of many ranks have the machine to themselves.
tests: $(READY) .venv/.libraries .venv/.browser
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests/unit tests/schedule tests/benchmarks
	$(BIN)/python -m pytest --ignore=tests/unit --ignore=tests/schedule --ignore=tests/benchmarks tests

# What takes too long for every day: a million mutated inputs a reader, every bad value of every option, three epochs of
# a million samples, twenty kills of random ranks under two plans, and two machines in network namespaces with everything
# that can happen to them: each case by itself, then 20 faults of a seed under each of three plans, then an hour in which
# nothing may grow.
soak: $(READY)
	STAGEWRIGHT_NIGHTLY=1 STAGEWRIGHT_FUZZ=1000000 STAGEWRIGHT_EPOCH_SAMPLES=1000000 \
		$(BIN)/python -m pytest -s tests/unit/data/test_fuzz.py tests/unit/data/test_loader.py
	STAGEWRIGHT_KILLS=20 $(BIN)/python -m pytest -s tests/distributed/test_kill.py tests/distributed/test_stopping.py \
		tests/distributed/test_pauses_gloo.py tests/unit/runtime/checkpoint
	STAGEWRIGHT_READER_FUZZ=8000 STAGEWRIGHT_ALL_OPTIONS=1 $(BIN)/python -m pytest -s tests/unit/test_fuzz_readers.py \
		tests/unit/runtime/checkpoint/test_forged.py tests/unit/cli/test_bad_options.py
	STAGEWRIGHT_SOAK=1 $(BIN)/python -m pytest -s tests/distributed/test_machines.py tests/distributed/test_slow_link.py \
		tests/distributed/test_planning.py tests/distributed/test_command.py tests/distributed/test_data.py tests/distributed/test_torchrun.py \
		tests/browser/test_demo_page.py tests/benchmarks/learning/test_study.py
	$(BIN)/python -m tests.soak --faults 20 --seed $(SEED)
	$(BIN)/python -m tests.soak --minutes 60 --plan stale

# Every case of the tests that take some each day, every command of README and docs, 500 cases of the planner's laws, the
# five splits of the measured rows, the demo from the wheel, and the self-test with real ranks.
nightly: $(READY) demo
	STAGEWRIGHT_NIGHTLY=1 $(BIN)/python -m pytest -s -n 2 --dist loadgroup tests/unit tests/schedule tests/benchmarks
	STAGEWRIGHT_NIGHTLY=1 $(BIN)/python -m pytest -s tests/distributed/test_engine.py tests/distributed/test_script.py \
		tests/distributed/test_examples.py tests/distributed/test_kill.py tests/distributed/test_torchrun.py
	$(BIN)/python -m benchmarks models

bench: $(READY)
	$(BIN)/python -m benchmarks overhead
	$(BIN)/python -m benchmarks peers
	$(BIN)/python -m benchmarks data

# torch first and pinned: a range would bring the newest build and its GPU packages.
$(READY): pyproject.toml
	@echo "installing into .venv, once: first torch, some minutes of downloading, then stagewright and its tools, about one"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install --editable '.[dev]'
	touch $(READY)

# Models that nobody here wrote. This torchvision belongs to torch 2.13.0, so that pip leaves torch as it is.
.venv/.libraries: $(READY)
	@echo "installing the libraries of models that tests train, once: about a minute"
	$(BIN)/pip install --no-compile torchvision==0.28.0 timm==1.0.30 transformers==5.22.2 peft==0.21.2 \
		accelerate==1.15.0
	touch $@

# Reports are tested in the system's Chromium; where there is none and no way to install it, those tests say so.
.venv/.browser: $(READY)
	@[ -n "$$STAGEWRIGHT_CHROMIUM" ] || command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		command -v google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core \
		>/dev/null; } || echo "no Chromium, and no apt-get as root to install it: tests of pages are skipped"
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
