#!/bin/bash
# compute-sanitizer's memcheck and racecheck over the GPU tests of the kernels, a few cases of each test.
# Only our kernels are watched; errors that library calls return are no findings. Under racecheck a product of cuBLAS's in
# 16 bits ends in an internal error, kernels of ours in the process or not: tests that launch its kernels are left out.
# Exit code 0: clean; 2: there is no compute-sanitizer, or it does not support this device.
# usage: benchmarks/sanitize.sh [tool ...]    CASES=2 SECONDS_EACH=45 TESTS="tests/kernels" by default
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=backend:ensemble:preprocessing:postprocessing:client:tests${PYTHONPATH:+:$PYTHONPATH}
export SLIPSTREAM_TEST_CASES=${CASES:-2} SLIPSTREAM_TEST_REPETITIONS=1
python=${PYTHON:-python3}
if [ $# -eq 0 ]; then set -- memcheck racecheck; fi

find_sanitizer() {
    command -v compute-sanitizer && return
    local nvcc place
    nvcc=$(readlink -f "$(command -v nvcc)" 2>/dev/null)
    for place in "${nvcc%/*}" /usr/local/cuda*/bin /usr/local/cuda*/compute-sanitizer; do
        if [ -x "$place/compute-sanitizer" ]; then echo "$place/compute-sanitizer"; return; fi
    done
    return 1
}
sanitizer=$(find_sanitizer) || { echo "sanitize: no compute-sanitizer on PATH or beside nvcc"; exit 2; }

# Under the sanitizer nothing runs beside anything else.
beside=(--deselect tests/kernels/test_gpu_upload.py::test_copies_that_are_under_way_are_not_waited_for)
with_cublas=(--deselect tests/kernels/test_gpu_cublaslt.py)
for name in test_gpu_linear.py::test_functions test_gpu_linear.py::test_sums_in_place test_gpu_eight_bits.py::test_extremes \
    test_gpu_eight_bits.py::test_overlapping_kernels_wait_for_each_other; do with_cublas+=(--deselect "tests/kernels/$name"); done
filters=()
for name in $("$python" - <<'NAMES'
import re, pathlib
for path in pathlib.Path("backend/slipstream/kernels").rglob("*.cu"):
    text = re.sub(r"__launch_bounds__\([^)]*\)", "", path.read_text())
    print(*re.findall(r"__global__[^(;{]*?(\w+)\s*\(", text))
NAMES
); do filters+=(--kernel-name "kne=$name"); done

status=0
for tool in "$@"; do
    log=$(mktemp)
    begin=$(date +%s)
    left_out=("${beside[@]}")
    if [ "$tool" = racecheck ]; then left_out+=("${with_cublas[@]}"); fi
    timeout "${SECONDS_EACH:-45}" "$sanitizer" --tool "$tool" --report-api-errors no --print-limit 20 \
        --error-exitcode 99 "${filters[@]}" \
        "$python" -m pytest -m gpu -q --tb=line --no-header -p no:cacheprovider "${left_out[@]}" ${TESTS:-tests/kernels} >"$log" 2>&1
    code=$?
    if grep -q "Device not supported" "$log"; then
        echo "$tool: compute-sanitizer does not support this device"; exit 2
    fi
    echo "$tool: exit code $code after $(($(date +%s) - begin)) s (99: findings, 124: out of time, 1: a test failed)"
    grep -E "SUMMARY|passed|failed" "$log" | tail -4
    grep -E "=========" "$log" | grep -vE "SUMMARY|COMPUTE-SANITIZER|cuGetProcAddress" | head -40
    if [ $code -ne 0 ]; then status=1; tail -5 "$log"; fi
    rm -f "$log"
done
exit $status
