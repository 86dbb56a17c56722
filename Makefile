# Slipstream. `make serve` and `make test` are all a newcomer needs; `make help` lists the rest.
SHELL := /bin/sh
.SUFFIXES:
.PHONY: help install install-serving serve chat check format test test-rest test-drawn test-durations test-slow test-ray test-gpu test-gpu-smoke bench bench-gpu bench-cpu bench-cpu-served test-cpu-forms test-amx guided-bench accuracy kv-accuracy bench-gateway bench-streams monitoring-tools browser screenshots sanitize-cpu perf locust overload isolation agreement sdks schemathesis soak fuzz limits fields families pairs attention compose-check figures draft adapter clean loc

PYTHON ?= python3
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
OPENAI_PORT ?= 9000
MODEL_REPOSITORY ?= model_repository
PYTEST_ARGS ?=
# More than two cores' worth: what starts servers waits for them as long as it computes.
WORKERS ?= 3
# Where bytecode is kept, tests are rewritten for their assertions once and not in each run.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
# The run ends with a worker that a test has ended (tests/fixtures/hangs.py): in one that took its
# place xdist would run that test again.
BESIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
ARGS ?=
PERF_ARGS ?=
LOCUST_ARGS ?=
REQUESTS ?= 100000
SOAK_ARGS ?= --requests 100000 --cancels 50000
BIN := .venv/bin

help:            ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

install:         ## .venv with pinned packages, and a tritonserver in .slipstream
	@$(PYTHON) ensemble/slipstream_serve/install.py

install-serving: ## the part of it that serving needs: make serve and make chat begin with it
	@$(PYTHON) ensemble/slipstream_serve/install.py --serving

chat: install-serving ## a real chat model (SmolLM2-135M, 93 MB), served, and a conversation in this terminal
	@$(BIN)/python -m slipstream_serve.chat_model .slipstream/chat
	@exec $(BIN)/slipstream serve --chat --model-repository .slipstream/chat/models \
	    --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) \
	    --openai-port $(OPENAI_PORT)

serve: install-serving ## a real tritonserver on model_repository/ (HTTP_PORT GRPC_PORT METRICS_PORT OPENAI_PORT)
	@exec $(BIN)/slipstream serve --demo --model-repository "$(MODEL_REPOSITORY)" \
	    --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) \
	    --openai-port $(OPENAI_PORT)

check: install   ## lint, format, types, import rules, words: what CI and pre-commit run
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy & types=$$!; \
	$(BIN)/lint-imports && $(BIN)/python tools/check_style.py; status=$$?; \
	wait $$types && exit $$status

format: install  ## apply the format and the safe fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test: check      ## the checks and the quick tests, the real server included: 8 minutes at most
	@$(PYTEST) --tier quick $(BESIDE) $(PYTEST_ARGS)

# Servers whose tests measure clocks are tested one after another. 5: PYTEST_ARGS leave none of a kind.
test-rest: install ## what make test leaves out and needs no GPU: products, soaks, faults
	@$(PYTEST) --tier rest -m "not triton or beside" $(BESIDE) $(PYTEST_ARGS); status=$$?; \
	$(PYTEST) --tier rest -m "triton and not beside" $(PYTEST_ARGS); servers=$$?; \
	[ $$servers -ne 5 ] || servers=$$status; [ $$status -ne 5 ] || status=$$servers; \
	exit $$((status > servers ? status : servers))

test-drawn: install ## the properties on other inputs in each run: test and test-rest draw the same each time
	@$(PYTEST) -m "hypothesis and not (gpu or slow or triton)" $(BESIDE) $(PYTEST_ARGS)

test-durations: install ## make test and make test-rest one test at a time, into tests/durations.json
	@$(PYTEST) --tier quick --record-durations $(PYTEST_ARGS)
	@$(PYTEST) --tier rest --record-durations $(PYTEST_ARGS)

test-slow: install ## the tests that take minutes each: long faults, long streams
	@$(PYTEST) -m "slow and not gpu" $(PYTEST_ARGS)

# Ray itself, and the one package of it that .venv lacks: what else it needs is there.
test-ray: install ## the ranks of a model on nodes of a Ray cluster, with the package ray in .slipstream/ray
	@$(BIN)/pip install -q --no-deps --target .slipstream/ray ray==2.60.0 msgpack==1.2.4
	@PYTHONPATH=.slipstream/ray $(PYTEST) tests/server/test_ray.py $(PYTEST_ARGS)

test-gpu: install ## the tests that need an NVIDIA GPU
	@$(PYTEST) -m gpu $(PYTEST_ARGS)

test-gpu-smoke: install ## two cases of each of them, a kernel twice: minutes, before the whole
	@SLIPSTREAM_TEST_CASES=2 SLIPSTREAM_TEST_REPETITIONS=2 \
	$(PYTEST) -m "gpu and not slow" $(PYTEST_ARGS)

bench: install   ## the engine alone on the shared workloads (ARGS="--shape ... NAME ...")
	@$(BIN)/python benchmarks/engine.py $(ARGS)

bench-gpu: install ## the GPU table, beside vLLM where it is; ARGS="--tensor-parallel N" or "--pipeline-parallel M": ranks; ends with one JSON line
	@$(BIN)/python benchmarks/$(if $(findstring -parallel,$(ARGS)),tensor_parallel.py,step.py --tune) $(ARGS)

bench-cpu: install ## a CPU beside llama.cpp and transformers, same model, bits and threads (ARGS="--threads 2"); ends likewise
	@$(BIN)/python benchmarks/cpu.py $(ARGS)

bench-cpu-served: install ## its streams through tritonserver beside the engine alone (ARGS="--streams 1 8 32"); ends likewise
	@$(BIN)/python benchmarks/cpu_served.py $(ARGS)

guided-bench: install ## ARGS="FOLDER" of JSON schemas, as JSONSchemaBench's: accepted, refused, invalid, mask times
	@$(BIN)/python benchmarks/guided.py $(ARGS)

accuracy: install ## what weights in fewer bits cost on three models, in all caches: docs/quantization.md; hours on two cores
	@$(BIN)/python benchmarks/accuracy.py $(ARGS)

kv-accuracy: install ## what a KV cache in fewer bits costs: the table of docs/quantization.md
	@$(BIN)/python benchmarks/kv_accuracy.py $(ARGS)

bench-gateway: install ## delays of streams through the gateway alone, from a paced source (ARGS="--seconds 300 --repeat 1")
	@$(BIN)/python benchmarks/gateway_streams.py $(ARGS)

bench-streams: install ## delays of streams through Triton beside their goals (ARGS="--seconds 300 --rows 256x100")
	@$(BIN)/python benchmarks/streams.py $(ARGS)
	@if [ -e /dev/nvidiactl ] && [ -z '$(ARGS)' ]; then $(BIN)/python benchmarks/through_triton.py; fi

monitoring-tools: install ## prometheus and promtool for the tests: on PATH, or Debian's, unpacked into .slipstream
	@$(BIN)/python load/monitoring_tools.py

browser: install ## a headless Chromium for the tests of the page: on PATH, or Debian's, unpacked likewise
	@$(BIN)/python load/browser.py

screenshots: install ## the pictures of docs/images: the chat page with the model of `make chat` (ARGS="--url ...")
	@$(BIN)/python load/screenshots.py $(ARGS)

# `none` is torch's path, as without a compiler; the best form is what `make test` runs.
CPU_FORMS ?= none avx2 avx512
test-cpu-forms: install ## the quick tests of what a CPU computes, with each lesser instruction set, and without our kernels
	@status=0; for form in $(CPU_FORMS); do \
	  echo "SLIPSTREAM_CPU_ISA=$$form"; \
	  SLIPSTREAM_CPU_ISA=$$form $(PYTEST) --tier quick $(BESIDE) tests/kernels tests/fuse tests/models tests/runner tests/engine $(PYTEST_ARGS) || status=1; \
	done; exit $$status

test-amx: install ## the tests of the CPU kernels on an emulated processor with AMX, of Bochs' sources in BOCHS=DIR
	@[ -n "$(BOCHS)" ] || { echo "test-amx needs BOCHS=DIR, Bochs' sources"; exit 2; }
	@emulator=$$(tools/amx/build.sh "$(BOCHS)" .slipstream/amx) && SLIPSTREAM_TEST_EMULATOR=$$emulator \
	$(PYTEST) -p no:cacheprovider $(CPU_KERNEL_TESTS) $(PYTEST_ARGS)

CPU_KERNEL_TESTS = $(wildcard tests/kernels/test_cpu_*.py) tests/fuse/test_whole_blocks.py
sanitize-cpu: install ## the tests of the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	@SLIPSTREAM_CPU_FLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" \
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
	$(PYTEST) -s -p no:cacheprovider $(CPU_KERNEL_TESTS) $(PYTEST_ARGS)

perf: install    ## perf_analyzer on the default repository; report in benchmarks/out/
	@$(BIN)/python load/run_perf.py $(PERF_ARGS)

locust: install  ## locust, gRPC and HTTP users, on the default repository; report likewise
	@$(BIN)/python load/run_locust.py $(LOCUST_ARGS)

overload: install ## the default model's peak, then ten times that for 2 minutes; fails where its promises break
	@$(BIN)/python load/overload.py $(ARGS)

isolation: install ## streams beside prompts of the longest length and bodies of 27 MB; fails likewise
	@$(BIN)/python load/isolation.py $(ARGS)

agreement: install ## slipstream bench, perf_analyzer and locust at one load, side by side
	@$(BIN)/python load/run_agreement.py $(ARGS)

sdks: install    ## openai, LangChain, LiteLLM, lm-eval, ... against a served model (ARGS="NAME ..."); report likewise
	@$(BIN)/python load/sdks/run.py $(ARGS)

schemathesis: install ## schemathesis on the gateway's OpenAPI file (ARGS="--examples 10"); report likewise
	@$(BIN)/python load/sdks/run_schemathesis.py $(ARGS)

soak: install    ## MINUTES=30: 80 % of peak, a fifth leaves; else 100,000 requests, half leave, then `make fuzz`
	@$(BIN)/python load/soak.py $(if $(MINUTES),--minutes $(MINUTES),$(SOAK_ARGS))
	@$(if $(MINUTES),,$(BIN)/python load/fuzz.py --requests $(REQUESTS))

compose-check: install ## the committed model_repository/ is what compose writes today
	@$(BIN)/slipstream compose --checkpoint model_repository/tensorrt_llm/1/checkpoint \
	    --output model_repository --instances postprocessing=2 --instances tensorrt_llm_bls=2 \
	    --instances vllm_model=2 --check

pairs: install   ## the table of docs/decoding.md: what one request cannot ask for together
	@$(BIN)/python -c "from slipstream_contract.pairs import page; print(page())"

limits: install  ## the table of docs/limits.md, on stdout
	@$(BIN)/python -c "from slipstream_contract.limits_page import page; print(page())"

fields: install  ## the tables of docs/responses.md, openai.md and tools.md, and openapi.json
	@$(BIN)/python tools/fields.py

families: install  ## the tables of docs/families.md, from the families' files
	@$(BIN)/python tools/families.py

attention: install  ## the tables of docs/attention.md, on stdout
	@$(BIN)/python -c "from slipstream.kernels.attention.table import tables; print(tables())"

fuzz: install    ## REQUESTS=100000 requests drawn over the contract, and as many over /v1; fails on any trace of them
	@$(BIN)/python load/fuzz.py --requests $(REQUESTS)
	@$(BIN)/python load/fuzz_v1.py --requests $(REQUESTS)

figures: install ## the tables and plots of README and docs, from the newest of benchmarks/results/
	@$(BIN)/python benchmarks/figures.py

draft: install   ## train what drafts for the default model, into .train/drafts: half an hour on two cores
	@$(BIN)/python training/drafts.py --target model_repository/tensorrt_llm/1/checkpoint \
	    --output .train/drafts $(ARGS)

adapter: install ## train a LoRA adapter of the default model, into .train/adapter: a minute or two on a core
	@$(BIN)/python training/adapter.py --output .train/adapter $(ARGS)

loc: install     ## lines of code by folder
	@git ls-files '*.py' '*.cu' '*.cuh' | awk -F/ '{print (NF > 2 ? $$1 "/" $$2 : $$1) "\t" $$0}' | \
	while IFS="$$(printf '\t')" read -r part file; do \
	    printf '%s\t%s\n' "$$part" "$$(wc -l <"$$file")"; done | \
	awk -F'\t' '{n[$$1] += $$2; all += $$2} END {for (p in n) printf "%7d %s\n", n[p], p; printf "%7d all\n", all}' | sort -n

clean:           ## all that was installed, built or cached in this checkout
	rm -rf .venv .slipstream build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis \
	    .import_linter_cache benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
