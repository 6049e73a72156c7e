#!/usr/bin/env bash
# All that needs a GPU, on one machine: the tests, then what is measured, with today's date in benchmarks/results.
#
#     benchmarks/gpu.sh                  # everything
#     benchmarks/gpu.sh tests memory     # some parts: tests, memory, qlora, speed
#
# Goes on where a part fails, names those at the end, and exits with 1 then. RESULTS=FOLDER writes elsewhere.
set -uo pipefail
cd "$(dirname "$0")/.."

results=${RESULTS:-benchmarks/results}
today=$(date -u +%F)
ranks=$(python -c "import torch; print(torch.cuda.device_count())")
failed=()

if [ "$ranks" = 0 ]; then
    echo "benchmarks/gpu.sh: torch sees no CUDA device on this machine" >&2
    exit 2
fi

try() {
    echo "== $*"
    "$@" || failed+=("$*")
}

tests() {
    try python -m pytest -q tests/gpu
}

memory() {
    for group in large matrix speech; do
        try python benchmarks/plan_accuracy.py --group "$group" --device cuda --out "$results/plan_cuda_${group}_$today.md"
    done
}

qlora() {
    for cap in 8 16 24; do
        try python benchmarks/qlora.py --shape 8b --ranks "$ranks" --cap-gib "$cap" --out "$results/qlora_8b_${cap}gib_$today.md"
    done
}

speed() {
    try python benchmarks/vit.py --ranks "$ranks" --image-size 224 --out "$results/vit_cuda_$today.md"
    try python benchmarks/optimizers.py --out "$results/optimizers_cuda_$today.md"
}

[ $# = 0 ] && set -- tests memory qlora speed
for part in "$@"; do
    case $part in
        tests | memory | qlora | speed) ;;
        *) echo "benchmarks/gpu.sh: got $part: expected tests, memory, qlora or speed" >&2; exit 2 ;;
    esac
done
for part in "$@"; do
    "$part"
done

for command in ${failed[@]+"${failed[@]}"}; do
    echo "failed: $command" >&2
done
[ ${#failed[@]} = 0 ]
