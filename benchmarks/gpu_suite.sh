#!/bin/bash
# The tests that need a GPU, every file in a process of its own, side by side (about 400 s on 16 cores; before them those
# that must be alone), then the kernels' table, on a machine where the project is not installed: python3 with torch, CuPy,
# cuda-bindings and pytest. Runs everything, whatever fails; exit code 1 if a file failed.
# FILES="tests/... ..." runs these alone, NO_BENCHMARK=1 leaves out the table.
# usage: benchmarks/gpu_suite.sh [pytest arguments]
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=backend:ensemble:preprocessing:postprocessing:client:tests${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
"$python" - <<'CHECK'
import importlib.util
for name in ("pytest", "torch", "cupy", "cuda.bindings", "hypothesis", "msgspec", "safetensors", "transformers", "tritonclient", "zmq"):
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        print(f"missing here: {name}")
CHECK
logs=$(mktemp -d)
run() {  # FILE [pytest arguments]
  local log="$logs/$(echo "$1" | tr / -).txt"
  "$python" -m pytest -m gpu -q -s --tb=short --no-header -p no:cacheprovider "$@" > "$log" 2>&1 || touch "$logs/failed"
  # Told at once and in one piece: whoever is cut off knows what has passed.
  echo "== $(basename "$log" .txt)
$(grep -aE "checks, [0-9]+ failed|FAILED|Error|passed|failed|skipped" "$log")"
}
files=" $(echo ${FILES:-$(grep -lE 'mark\.gpu|DEVICES' tests/*/test_*.py | grep -v ^tests/suite/)}) "
# The first measures what is free, the second fills the device.
for file in tests/runner/test_gpu_memory.py tests/faults/test_engine_process.py; do
  case "$files" in *" $file "*) run "$file" "$@" ;; esac
  files=${files/" $file "/ }
done
for file in $files; do run "$file" "$@" & done
wait
[ ! -e "$logs/failed" ]
status=$?
if [ -z "$NO_BENCHMARK" ]; then "$python" benchmarks/kernel_times.py; fi
exit $status
