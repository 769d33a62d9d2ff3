#!/usr/bin/env bash
# The first run on a machine with one GPU: what matters most first, each step bounded, 15 minutes at most.
#
#     scripts/first-gpu-run.sh [--quick] [FOLDER]
#
# Needs a CUDA build of torch and Tandem's packages, but neither Ray nor a network; 20 GB of disk in TMPDIR. Tests run side
# by side where pytest-xdist is. Writes to FOLDER (default: gpu-run) results.jsonl (one line per step and per figure),
# report.md, and the log of each step. Ends with 1 if a step failed. --quick: tiny, on the CPU, to see that every step runs.
source "$(dirname "$0")/gpu-run.sh" "First run on a GPU" gpu-run "$@"
model=$(mktemp -d) # 16 GB of weights, which the first figure writes
trap 'rm -rf "$model"' EXIT

needs_gpus 1
# Exactness before the many variants of kernels, each of which is compiled for up to a minute.
step engine_exact 100 "${pytest[@]}" "${together[@]}" tests/gpu/test_gpu_engine.py tests/gpu/test_gpu_experts.py \
  -k "not every_kernel"
step handoff 90 "${pytest[@]}" "${together[@]}" tests/gpu/test_gpu_handoff.py
step served 110 "${pytest[@]}" "${together[@]}" tests/gpu/test_gpu_up.py tests/gpu/test_gpu_served.py
step engine_speed 190 "$python" -m benchmarks.engine_device --model "$model" "${quick[@]}"
step handoff_speed 60 "$python" -m benchmarks.handoff --figure gpu_mapped "${quick[@]}"
step exposed_share 90 "$python" -m benchmarks.handoff --figure gpu_exposed_share --model "$model" "${quick[@]}"
step kernels 100 "${pytest[@]}" "${together[@]}" tests/gpu/test_gpu_engine.py -k every_kernel
[ ${#quick[@]} != 0 ] || step kernel_speed 80 "$python" -m benchmarks.device_kernels --limit-s 20
report
