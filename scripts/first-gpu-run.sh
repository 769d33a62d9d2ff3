#!/usr/bin/env bash
# The first run on a machine with one GPU: what matters most first, each step bounded, 25 minutes in all.
#
#     scripts/first-gpu-run.sh [--quick] [FOLDER]
#
# Needs a CUDA build of torch and Tandem's packages, but neither Ray nor a network; 20 GB of disk in TMPDIR. Writes to
# FOLDER (default: gpu-run) results.jsonl (one line per step and per figure), report.md, and the log of each step. Ends
# with 1 if a step failed. --quick: tiny, on the CPU, to see that every step runs.
source "$(dirname "$0")/gpu-run.sh" "First run on a GPU" gpu-run "$@"
model=$(mktemp -d) # 16 GB of weights, which the first figure writes
trap 'rm -rf "$model"' EXIT

needs_gpus 1
# Exactness before the many variants of kernels, each of which is compiled for up to a minute.
step engine_exact 240 "${pytest[@]}" tests/gpu/test_gpu_engine.py \
  -k "give_the_tokens or preemption or constrained or element_wise or 8b_model"
step handoff 120 "${pytest[@]}" tests/gpu/test_gpu_handoff.py -k "ipc or process or flipped or copies"
step served 150 "${pytest[@]}" tests/gpu/test_gpu_up.py
step nccl 90 "${pytest[@]}" tests/gpu -k nccl
step engine_speed 330 "$python" -m benchmarks.engine_device --model "$model" "${quick[@]}"
step handoff_speed 60 "$python" -m benchmarks.handoff --figure gpu_mapped "${quick[@]}"
step exposed_share 150 "$python" -m benchmarks.handoff --figure gpu_exposed_share --model "$model" "${quick[@]}"
rest=(tests/gpu/test_gpu_served.py tests/gpu/test_gpu_handoff.py tests/gpu/test_gpu_engine.py)
[ ${#quick[@]} = 0 ] || rest+=(-k "on_one_gpu_gives and tcp") # the others ran before, or need CUDA
step all_gpu_tests 300 "${pytest[@]}" "${rest[@]}"
report
