# Everything a newcomer needs: `make demo` and `make test` set the project up first.
VENV := .venv
READY := $(VENV)/.ready
BENCHMARKS := $(basename $(notdir $(shell grep -l __main__ benchmarks/*.py 2>/dev/null)))

.PHONY: help setup demo test test-long lint bench

help:
	@echo "make setup   virtual environment, dependencies and Java (redone when pyproject.toml changes)"
	@echo "make demo    a stream on an embedded Spark cluster"
	@echo "make test    lint, tests without Spark, tests on real Spark processes"
	@echo "make test-long  the same with more kills, slices and seeds"
	@echo "make lint    ruff and mypy"
	@echo "make bench   every benchmark in its quick form"

setup: $(READY)

$(READY): pyproject.toml
	scripts/setup.sh $(VENV)
	@touch $@

demo: $(READY)
	$(VENV)/bin/anabranch demo

lint: $(READY)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy src benchmarks $(wildcard examples)

test: lint
	$(VENV)/bin/pytest -n auto tests --ignore=tests/spark
	$(VENV)/bin/pytest -n 2 --dist loadfile tests/spark --durations=15

test-long: export ANABRANCH_LONG_TESTS := 1
test-long: test

bench: $(READY)
	@for name in $(BENCHMARKS); do \
		echo "== $$name"; \
		$(VENV)/bin/python -m benchmarks.$$name --quick || exit 1; \
	done
