#!/usr/bin/env bash
# Trains the candidates side by side, scores them and keeps the best.
#   DATA           data.tar.xz and tokenizer-N/ (made here when missing)      default .train
#   OUT            receives default-model/ and the logs                       default .train/out
#   CANDIDATES     names from train.py                                        default "dropout dropout20 dropout30 deep20"
#   TIME_BUDGET_S  seconds of training for each; they share the GPUs          default 360
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
DATA=${DATA:-.train} OUT=${OUT:-.train/out} PYTHON=${PYTHON:-python3}
CANDIDATES=${CANDIDATES:-dropout dropout20 dropout30 deep20} TIME_BUDGET_S=${TIME_BUDGET_S:-360}
EVERY=${EVERY:-1}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=true

mkdir -p "$DATA" "$OUT"
[ -f "$DATA/data.tar.xz" ] || "$PYTHON" "$here/data.py" --pack "$DATA/data.tar.xz"
for size in 3072 4096; do
    [ -d "$DATA/tokenizer-$size" ] ||
        "$PYTHON" "$here/tokenizer.py" "$DATA/data.tar.xz" "$DATA/tokenizer-$size" --size "$size"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
num_gpus=$(nvidia-smi -L 2>/dev/null | grep -c . || true)
gpu=0
directories=()
for name in $CANDIDATES; do
    (
        [ "$num_gpus" -eq 0 ] || export CUDA_VISIBLE_DEVICES=$((gpu % num_gpus))
        "$PYTHON" "$here/train.py" "$name" --data "$DATA" --output "$work/$name" \
            --seconds "$TIME_BUDGET_S"
        "$PYTHON" "$here/evaluate.py" "$work/$name" --data "$DATA/data.tar.xz" --every "$EVERY"
    ) >"$work/$name.log" 2>&1 &
    directories+=("$work/$name")
    gpu=$((gpu + 1))
done
wait

for name in $CANDIDATES; do
    echo "== $name"
    grep -v '^ *[0-9.]*% step [0-9]*[1-9]00 ' "$work/$name.log" | tail -n 90
    cat "$work/$name.log" >>"$OUT/training.log"
done
"$PYTHON" "$here/evaluate.py" --choose "$OUT/default-model" "${directories[@]}"
