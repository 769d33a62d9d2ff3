#!/usr/bin/env bash
# The first run on a machine with one GPU: what matters most first, each step bounded, 25 minutes in all.
#
#     scripts/first-gpu-run.sh [FOLDER]
#
# Needs a CUDA build of torch and Tandem's packages, but neither Ray nor a network. Writes to FOLDER (default: gpu-run)
# results.jsonl (one line per step and per figure), report.md, and the log of each step. Ends with 1 if a step failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-run}
mkdir -p "$out"
: >"$out/results.jsonl"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
python=${PYTHON:-python3}
pytest=("$python" -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode importlib -q -p no:cacheprovider)
failed=0

# step NAME SECONDS COMMAND...: runs a command, and records its end and its figures
step() {
  local name=$1 limit_s=$2 began=$SECONDS rc=0
  shift 2
  echo "== $name (at most $limit_s s)"
  timeout -k 10 "$limit_s" "$@" >"$out/$name.log" 2>&1 || rc=$?
  [ "$rc" = 0 ] || failed=1
  grep -E '^\{"figure"' "$out/$name.log" >>"$out/results.jsonl" || true
  printf '{"step": "%s", "rc": %d, "seconds": %d}\n' "$name" "$rc" $((SECONDS - began)) >>"$out/results.jsonl"
  tail -n 3 "$out/$name.log"
}

step device 60 "$python" -c '
import torch
assert torch.cuda.is_available(), "torch finds no GPU"
print(torch.__version__, torch.version.cuda, "nccl", torch.cuda.nccl.version())
for index in range(torch.cuda.device_count()):
    print(index, torch.cuda.get_device_properties(index))'
[ "$failed" = 0 ] || exit 1
step engine_exact 240 "${pytest[@]}" tests/gpu/test_gpu_engine.py -k "recorded or kernel or element or preemption"
step handoff 180 "${pytest[@]}" tests/gpu/test_gpu_handoff.py
step served 180 "${pytest[@]}" tests/gpu/test_gpu_served.py
step engine_speed 420 "$python" -m benchmarks.engine_device
step handoff_speed 120 "$python" -m benchmarks.handoff --figure gpu_mapped
step all_gpu_tests 300 "${pytest[@]}" tests/gpu

"$python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
report = ["# First run on a GPU", "", "```", (folder / "device.log").read_text().strip(), "```", ""]
report += ["| step | result | seconds |", "|---|---|---|"]
ends = {0: "passed", 124: "ran out of time", 137: "killed"}
report += [f"| {each['step']} | {ends.get(each['rc'], 'failed')} | {each['seconds']} |" for each in lines if "step" in each]
report += ["", "| figure | value | unit | reference | ratio |", "|---|---|---|---|---|"]
report += [
    f"| `{each['figure']}` | {each['value']} | {each['unit']} | {each['reference']} | {each['ratio']} |"
    for each in lines
    if "figure" in each
]
(folder / "report.md").write_text("\n".join(report) + "\n")
PYTHON
echo "== $out/report.md"
exit "$failed"
