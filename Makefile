# Every target creates .venv if there is none, and installs only what the target needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test mutation test-slow test-triton test-gpu check docs bench bench-gpu soak killed-rounds clean

.venv/installed: requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# The tests read the pages of the documentation, so they need what builds them.
.venv/installed-test: requirements-test.txt .venv/installed-docs
	$(BIN)/python -m pip install --quiet --requirement requirements.txt --requirement requirements-test.txt
	touch $@

.venv/installed-check: requirements-check.txt .venv/installed-test
	$(BIN)/python -m pip install --quiet --requirement requirements-check.txt
	touch $@

.venv/installed-docs: requirements-docs.txt .venv/installed
	$(BIN)/python -m pip install --quiet --requirement requirements.txt --requirement requirements-docs.txt
	touch $@

# Models of other projects, for the slow tests only; they must not replace what is installed.
.venv/installed-slow: requirements-slow.txt .venv/installed-test
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-slow.txt
	touch $@

demo: .venv/installed
	$(BIN)/ikkuna demo

# New memory holds this byte in tests, so that none passes because memory happened to be zero.
test test-slow test-triton test-gpu: export MALLOC_PERTURB_ := 165

test: .venv/installed-test
	$(BIN)/python -m pytest -q --numprocesses auto --dist loadfile
	$(BIN)/python -m pytest -q --device sim

test-slow: .venv/installed-slow
	$(BIN)/python -m pytest -q -m slow
	$(BIN)/python -m pytest -q -m slow --device sim

# Programs of many kinds with and without ikkuna; it continues where it was, and writes the table of the documentation.
.PHONY: trial
trial: .venv/installed-slow
	OMP_NUM_THREADS=1 nice $(BIN)/python -m tests.trial
	OMP_NUM_THREADS=1 nice $(BIN)/python -m tests.real_models

# Triton's interpreter on the simulated accelerator; an environment of its own, because torch takes other ways if Triton is there.
test-triton: .venv/installed-test
	test -x .venv-triton/bin/python || $(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --no-deps triton==3.9.0
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$(.venv-triton/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/environment.pth"
	TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest -q --triton
	TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest -q --device sim --triton

# Changes one place of the code after another and runs the nearest tests; an interrupted run goes on where it stopped.
mutation: .venv/installed-test
	$(BIN)/python -m pip install --quiet coverage==7.17.4
	$(BIN)/python -m tests.mutation.run

# Without a device these tests are skipped.
test-gpu: .venv/installed-test
	$(BIN)/python -m pytest -q -m gpu

check: .venv/installed-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-test
	$(BIN)/python -m sphinx -q -n -W -b html sphinx/source sphinx/build

bench: .venv/installed
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/overhead.py --compiled
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/probes.py
	$(BIN)/python benchmarks/metrics.py

# Needs a CUDA or ROCm device; says so if there is none.
bench-gpu: .venv/installed
	$(BIN)/python -m benchmarks.gpu

# Two hours; prints what is open and kept each minute, and "flat" at the end.
# A wheel for this kind of machine, with the native functions that need no header of torch.
.PHONY: wheel
wheel: .venv/installed
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

soak: .venv/installed
	$(BIN)/python benchmarks/soak.py

# A thousand trainings, killed under faults of the disk; about an hour.  A second call goes on where the first one ended.
killed-rounds: .venv/installed-test
	$(BIN)/python -m tests.fault_injection.killed_training build/killed_rounds 1000

clean:
	rm -rf .venv .venv-triton build/killed_rounds sphinx/build
