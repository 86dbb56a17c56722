#!/bin/bash
# The tests that need a GPU, then the kernels' table, on a machine where the project is not installed:
# python3 with torch, CuPy, cuda-bindings and pytest. Runs everything, whatever fails; exit code of the tests.
# usage: benchmarks/gpu_suite.sh [pytest arguments; default: tests/kernels tests/models]
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=backend:ensemble:preprocessing:postprocessing:client:tests${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
if [ $# -eq 0 ]; then set -- tests/kernels tests/models; fi
"$python" - <<'CHECK'
import importlib.util
for name in ("pytest", "torch", "cupy", "cuda.bindings", "hypothesis", "msgspec", "safetensors", "transformers"):
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        print(f"missing here: {name}")
CHECK
"$python" -m pytest -m gpu -q -s --tb=line --no-header -p no:cacheprovider "$@"
status=$?
if [ -z "$NO_BENCHMARK" ]; then "$python" benchmarks/kernel_times.py; fi
exit $status
