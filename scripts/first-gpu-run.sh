#!/usr/bin/env bash
# The first run on a machine with one GPU: what matters most first, each step bounded, 25 minutes in all.
#
#     scripts/first-gpu-run.sh [FOLDER]
#
# Needs a CUDA build of torch and Tandem's packages, but neither Ray nor a network. Writes to FOLDER (default: gpu-run)
# results.jsonl (one line per step and per figure), report.md, and the log of each step. Ends with 1 if a step failed.
source "$(dirname "$0")/gpu-run.sh" "${1:-gpu-run}"

needs_gpus 1
step engine_exact 240 "${pytest[@]}" tests/gpu/test_gpu_engine.py -k "recorded or kernel or element or preemption"
step handoff 180 "${pytest[@]}" tests/gpu/test_gpu_handoff.py
step served 180 "${pytest[@]}" tests/gpu/test_gpu_served.py
step engine_speed 420 "$python" -m benchmarks.engine_device
step handoff_speed 120 "$python" -m benchmarks.handoff --figure gpu_mapped
step all_gpu_tests 300 "${pytest[@]}" tests/gpu
report "First run on a GPU"
