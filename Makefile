# One command each for what people and CI do with the project. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STACK := $(PYTHON) infra/local/stack.py

.DEFAULT_GOAL := help
.PHONY: help venv up down status demo test test-hardened check chaos bench-goodput bench-memory bench-overhead bench-policy-cpu bench-scheduler bench-model-cache fuzz docs lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

venv: ## make the virtual environment, if it is not current
	@$(PYTHON) infra/local/environment.py

up: ## bring RabbitMQ and Redis up and print their addresses
	@$(STACK) up

down: ## take them down
	@$(STACK) down

# "Down" is an answer, not a failure of make; scripts take the exit status of stack.py itself.
status: ## say whether they are up
	@$(STACK) status || test $$? -eq 1

demo: venv ## answers from a real model, from nothing; leaves nothing running
	@$(STACK) run -- $(BIN)/python infra/demo/demo.py

test: check ## every gate and every test, on a broker and Redis of its own
	@$(STACK) prepare
	@$(BIN)/python -m pytest $(ARGS)

# A private pair from the installed packages, which alone can be told to speak TLS only.
test-hardened: venv ## tests/e2e with TLS only and a user with the least rights for everybody (ARGS="-k pause" for less)
	@INFERQ_STACK=binaries $(STACK) prepare
	@INFERQ_TEST_SECURITY=hardened $(BIN)/python -m pytest tests/e2e $(ARGS)

check: venv ## lint, security lint, format, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/bandit -q -c pyproject.toml -r schemas producer worker infra
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

chaos: venv ## a load under faults, and a checker (SEED=1 MINUTES=5 FAULTS=all RATE=1 OLD=revision; ARGS=--list lists faults)
	@$(STACK) run -- $(BIN)/python -m tests.chaos --seed $(or $(SEED),1) \
		--minutes $(or $(MINUTES),5) --faults $(or $(FAULTS),all) --rate $(or $(RATE),1) --old '$(OLD)' $(ARGS)

bench-goodput: venv ## goodput under overload against size-or-timeout and the simulator; nine minutes (ARGS="--seconds 15" for less)
	@$(STACK) run -- $(BIN)/python -m tests.bench.goodput $(ARGS)

bench-memory: venv ## resident memory of a worker over 200,000 jobs of random sizes and shapes (ARGS="--jobs 20000" for less)
	@$(STACK) run -- $(BIN)/python -m tests.bench.soak_memory $(ARGS)

bench-overhead: venv ## CPU that the worker adds to a run, between the scheduler and the results
	@$(BIN)/python -m tests.bench.overhead $(ARGS)

bench-policy-cpu: venv ## CPU of a worker a job at saturation: deadline scheduler against the plain batcher
	@$(STACK) run -- $(BIN)/python -m tests.bench.policy_cpu $(ARGS)

bench-scheduler: venv ## CPU of a scheduler step against a heapq push and pop
	@$(BIN)/python -m tests.bench.bench_scheduler $(ARGS)

bench-model-cache: venv ## what runtime.cache_dir saves at the second start, on the CPU
	@$(BIN)/python -m tests.bench.bench_model_cache

MINUTES ?= 10
fuzz: venv ## millions of strange bodies into the decoders (MINUTES=10)
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

docs: venv ## regenerate the files that are made from code
	@$(BIN)/python -m inferq_schemas.documents --write
	@$(BIN)/python infra/docs/configuration.py
	@$(BIN)/python infra/rabbitmq/generate.py
	@$(BIN)/python infra/docker/make_example.py

lock: ## resolve the lock files again (needs the network)
	@$(PYTHON) infra/lock/lock.py

clean: down ## remove caches and build output; the virtual environment stays
	@rm -rf .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find schemas producer worker infra tests -name __pycache__ -type d -prune -exec rm -rf {} +
