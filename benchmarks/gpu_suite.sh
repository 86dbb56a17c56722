#!/bin/bash
# The tests that need a GPU, every file in a process of its own, on a machine where the project is not installed: python3 with
# torch, CuPy, cuda-bindings and pytest. First those that must be alone, then the others, the longest first and at most
# JOBS (20) at a time; then the kernels' table. Runs everything, whatever fails; exit code 1 if a file failed.
# PART=1/2 and PART=2/2 are two calls of about the same length, by gpu_suite_seconds.txt, without the table.
# FILES="tests/... ..." runs these alone, NO_BENCHMARK=1 leaves out the table, LIST=1 prints the files and runs none.
# usage: benchmarks/gpu_suite.sh [pytest arguments]
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=backend:ensemble:preprocessing:postprocessing:client:tests${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3} jobs_at_once=${JOBS:-20} part=${PART:-1/1}
if ! [[ $part =~ ^([1-9][0-9]*)/([1-9][0-9]*)$ ]] || [ "${BASH_REMATCH[1]}" -gt "${BASH_REMATCH[2]}" ]; then
  echo "gpu_suite: PART=$part is no I/N with I from 1 to N" >&2
  exit 2
fi
# The first measures what is free, the second fills the device.
alone="tests/runner/test_gpu_memory.py tests/faults/test_engine_process.py"
# The files of this part, the longest first. One that runs alone counts as often as others run beside each other.
in_order() {
  awk -v part="$part" -v alone=" $alone " -v jobs="$jobs_at_once" '
    FNR == NR { if ($1 !~ /^#/) took[$2] = $1; next }
    { s = $1 in took ? took[$1] : 100; print (index(alone, " " $1 " ") ? s * jobs : s), $1 }
  ' benchmarks/gpu_suite_seconds.txt - | sort -k1,1rn -k2 | awk -v part="$part" '
    BEGIN { split(part, of, "/") }
    {
      least = 1
      for (i = 2; i <= of[2]; i++) if (sum[i] < sum[least]) least = i
      sum[least] += $1
      if (least == of[1]) print $2
    }'
}
files=" $(printf '%s\n' ${FILES:-$(grep -lE 'mark\.gpu|DEVICES' tests/*/test_*.py | grep -v ^tests/suite/)} | in_order | tr '\n' ' ') "
if [ -n "$LIST" ]; then printf '%s\n' $files; exit; fi
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
  local log="$logs/$(echo "$1" | tr / -).txt" started=$SECONDS
  "$python" -m pytest -m gpu -q -s --tb=short --no-header -p no:cacheprovider "$@" > "$log" 2>&1 || touch "$logs/failed"
  # Told at once and in one piece: whoever is cut off knows what has passed.
  echo "== $(basename "$log" .txt), $((SECONDS - started)) s
$(grep -aE "checks, [0-9]+ failed|FAILED|Error|passed|failed|skipped" "$log")"
}
for file in $alone; do
  case "$files" in *" $file "*) run "$file" "$@" ;; esac
  files=${files/" $file "/ }
done
for file in $files; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs_at_once" ]; do wait -n; done
  run "$file" "$@" &
done
wait
[ ! -e "$logs/failed" ]
status=$?
if [ -z "$NO_BENCHMARK$PART" ]; then "$python" benchmarks/kernel_times.py; fi
exit $status
