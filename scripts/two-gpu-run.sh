#!/usr/bin/env bash
# The run on a machine with two GPUs or more, after first-gpu-run.sh: what only two can show. 15 minutes.
#
#     scripts/two-gpu-run.sh [--quick] [FOLDER]
#
# Needs what first-gpu-run.sh needs, and writes the same files to FOLDER (default: gpu-run-two). Ends with 1 if a step
# failed. --quick: tiny, on the CPU, to see that every step runs.
source "$(dirname "$0")/gpu-run.sh" "Run on two GPUs" gpu-run-two "$@"

needs_gpus 2
[ ${#quick[@]} != 0 ] || step topology 30 nvidia-smi topo -m
step copies 120 "${pytest[@]}" tests/gpu/test_gpu_handoff.py -k "copies or cuda_ipc"
step nccl 120 "${pytest[@]}" tests/gpu/test_gpu_handoff.py -k nccl
step served 180 "${pytest[@]}" tests/gpu/test_gpu_served.py -k between_two
step ranks 240 "${pytest[@]}" tests/gpu/test_gpu_served.py -k two_ranks
step handoff_speed 150 "$python" -m benchmarks.handoff --figure gpu_peers "${quick[@]}"
report
