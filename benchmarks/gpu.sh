#!/usr/bin/env bash
# All that needs a GPU, on one machine, in 50 minutes by estimate: the tests, then what is measured. Pages are dated, in benchmarks/results.
#
#     benchmarks/gpu.sh                  # everything
#     benchmarks/gpu.sh tests memory     # some parts
#     DEVICE=cpu benchmarks/gpu.sh       # the same commands in small on a CPU, to try them; without the tests
#
# Part      minutes  what it does (minutes expected on a card such as an H200 with 16 cores; nobody has timed them yet)
# tests         5    tests/gpu, those with several ranks on one card included
# default       3    the default tier of the tests, with the GPU visible
# memory        5    peaks of the closed form, the trace and the allocator: steps of some GiB, and 48 small ones
# qlora         6    QLoRA at the shape of an 8B model beside torch + peft + bitsandbytes, under caps of 8, 16 and 24 GiB
# lora          4    LoRA over bfloat16 likewise, under caps of 24 and 16 GiB (which it does not fit), and where its step goes
# context       4    QLoRA at the shape of an 8B model with long rows under a cap of 24 GiB, inputs of blocks on the host and not
# offload       4    full training at the shape of an 8B model, 8 layers, without offload, with it, and with steps beside compute
# two_ranks     1    two ranks on one card through gloo: no measure of speed
# packed        2    packed rows of 16,384 tokens with a mask, without one, and by flex attention: memory and time
# steps         7    a language model and a vision transformer beside a plain loop over FSDP2 and the Trainer of Transformers
# records       8    LoRA at the shape of an 8B model, rows of 4,096 tokens without recomputation, compiled too, and TRL where it is installed; then
#                    QLoRA, adapters of experts and speech beside stock on one rank
# speed         1    steps of optimizers
#
# A part is interrupted after twice its minutes, each of its commands after nine at most; tests then still say what failed. Goes on where a part or a piece of
# it fails, names those at the end, and exits with 1 then. RESULTS=FOLDER writes elsewhere. Of pages that need several runs, what there is so
# far is in the file.
set -uo pipefail
cd "$(dirname "$0")/.."

results=${RESULTS:-benchmarks/results}
device=${DEVICE:-cuda}
today=$(date -u +%F)
failed=()
parts=(tests default memory qlora lora context offload two_ranks packed steps records speed)
mkdir -p "$results"

try() { # minutes, command
    local minutes=$1
    shift
    echo "== $* (at most $minutes min)"
    SECONDS=0
    timeout --signal=INT --kill-after=15 "${minutes}m" "$@" || failed+=("$*")
    echo "== took $SECONDS s"
}

run_tests() { # minutes, arguments; several at a time where pytest-xdist is there
    local minutes=$1
    shift
    local spread=()
    python3 -c "import xdist" 2>/dev/null && spread=(-n "$workers")
    try "$minutes" python3 -m pytest -q ${spread[@]+"${spread[@]}"} "$@"
}

if [ "$device" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=
    ranks=1 jobs=1 shape=(--shape tiny --length 32 --steps 4 --repeats 1)
    parts=(memory qlora lora context offload two_ranks packed steps records speed)
    steps=(--size tiny --ranks 2 --rounds 1 --steps 6 --cases vit --variants plain ours hf_trainer)
else
    ranks=$(python3 -c "import torch; print(torch.cuda.device_count())")
    if [ "$ranks" = 0 ]; then
        echo "benchmarks/gpu.sh: torch sees no CUDA device on this machine; DEVICE=cpu tries the commands on a CPU" >&2
        exit 2
    fi
    # Cases of some GiB at a time, each beside a CUDA context of its own; tests are mostly imports, and take up to a few GiB.
    read -r jobs workers < <(python3 -c "import os, torch; n, free = os.cpu_count(), torch.cuda.mem_get_info()[0] >> 30
print(max(1, min(n // 2, free // 24)), max(1, min(n - 2, free // 5)))")
    steps=(--ranks "$ranks" --rounds 2 --precision bf16-mixed --cases full vit --variants plain ours ours_monitored hf_trainer)
fi
variants=(--variants stock "ours 1")
[ "$ranks" -gt 1 ] && variants+=(accelerate ours)

tests() {
    run_tests 6 tests/gpu --ignore=tests/gpu/test_memory.py
    try 4 python3 -m pytest -q tests/gpu/test_memory.py  # alone: it compares what is free on the card
}

default() { run_tests 6 --ignore=tests/gpu; }

memory() {
    if [ "$device" = cpu ]; then
        try 5 python3 benchmarks/plan_accuracy.py --group matrix --only "llama, lora, 32-true, 1 ranks" --out "$results/plan_cpu_$today.md"
        return
    fi
    try 5 python3 benchmarks/plan_accuracy.py --group large --device cuda --jobs "$jobs" --out "$results/plan_cuda_large_$today.md"
    try 4.5 python3 benchmarks/plan_accuracy.py --group matrix --only llama, --device cuda --jobs "$jobs" --out "$results/plan_cuda_matrix_$today.md"
}

adapters() { # minutes, cap in GiB, name of the page, options
    local minutes=$1 cap=$2 name=$3
    shift 3
    [ "$device" = cpu ] && set -- "$@" --device cpu "${shape[@]}" # the last of two wins
    try "$minutes" python3 benchmarks/qlora.py --shape 8b --ranks "$ranks" "${variants[@]}" --cap-gib "$cap" --out "$results/${name}_$today.md" "$@"
}

qlora() {
    local variants=("${variants[@]}" "ours 1 kept")
    adapters 5 16 qlora_8b_16gib --length 2048 --repeats 2 --profile
    [ "$device" = cpu ] && return # the caps differ on GPUs only
    adapters 2.5 8 qlora_8b_8gib --length 512 --repeats 1
    adapters 2.5 24 qlora_8b_24gib --length 4096 --repeats 1
}

lora() {
    adapters 5 24 lora_8b_24gib --base bf16 --length 2048 --repeats 2 --profile
    [ "$device" = cpu ] && return
    adapters 2.5 16 lora_8b_16gib --base bf16 --length 512 --repeats 1
}

context() {
    local ours=(--repeats 1 --variants "ours 1")
    adapters 2 24 qlora_8b_24gib_16k --length 16384 "${ours[@]}"
    adapters 2 24 qlora_8b_24gib_16k_offload --length 16384 "${ours[@]}" --offload
    [ "$device" = cpu ] && return
    adapters 3 24 qlora_8b_24gib_48k_offload --length 49152 --steps 4 "${ours[@]}" --offload
}

offload() {
    local setting=(--device cuda --layers 8 --length 16384 --repeats 2)
    [ "$device" = cpu ] && setting=(--shape tiny --layers 2 --length 64 --steps 5 --repeats 1)
    try 8 python3 benchmarks/offload.py "${setting[@]}" --out "$results/offload_${device}_$today.md"
}

two_ranks() {
    local where=(--shape small)
    [ "$device" = cpu ] && where=(--device cpu "${shape[@]}")
    try 2 python3 benchmarks/qlora.py --repeats 1 "${where[@]}" --ranks 2 --variants ours --one-card --profile --out "$results/two_ranks_one_card_$today.md"
}

packed() {
    local setting=(--device cuda --precision bf16-true --steps 8 --repeats 1 --attention sdpa auto flex_attention)
    [ "$device" = cpu ] && setting=(--length 256 --documents 4 --repeats 1)
    try 4 python3 benchmarks/packed_attention.py "${setting[@]}" --out "$results/packed_attention_${device}_$today.md"
}

steps() {
    try 9 python3 benchmarks/step.py "${steps[@]}" --out "$results/step_${device}_$today.json"
}

records() {
    local lora=(--shape 8b --length 4096 --repeats 2) trl=()
    local step=(--precision bf16-mixed --cases qlora_1 experts_qlora speech --variants plain stock ours hf_trainer)
    [ "$device" = cpu ] && lora=(--device cpu "${shape[@]}") step=(--size tiny --steps 6 --cases experts_qlora)
    python3 -c "import trl" 2>/dev/null && trl=(trl)
    try 8 python3 benchmarks/qlora.py "${lora[@]}" --base bf16 --keep-activations --ranks 1 --variants stock "ours 1" "ours 1 compiled" ${trl[@]+"${trl[@]}"} \
        --out "$results/lora_8b_4096_$today.md"
    try 8 python3 benchmarks/step.py "${step[@]}" --ranks 1 --rounds 1 --out "$results/step_one_rank_${device}_$today.json"
}

speed() {
    try 1 python3 benchmarks/optimizers.py --out "$results/optimizers_${device}_$today.md"
}

known=("${parts[@]}")
[ $# = 0 ] && set -- "${parts[@]}"
for part in "$@"; do
    if [[ " ${known[*]} " != *" $part "* ]]; then
        echo "benchmarks/gpu.sh: got $part: expected one of ${known[*]}" >&2
        exit 2
    fi
done
for part in "$@"; do
    "$part"
done

for command in ${failed[@]+"${failed[@]}"}; do
    echo "failed: $command" >&2
done
[ ${#failed[@]} = 0 ]
