# What first-gpu-run.sh and two-gpu-run.sh share: bounded steps, and a report of them. Source it with a title, the default
# folder, and the arguments of the script: [--quick] [FOLDER].
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
title=$1 out=$2
shift 2
quick=()
for argument in "$@"; do
  if [ "$argument" = --quick ]; then quick=(--quick); else out=$argument; fi
done
mkdir -p "$out"
: >"$out/results.jsonl"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
patience=1 # times the limit of each step: --quick is not for the time of a lent machine
if [ ${#quick[@]} != 0 ]; then
  export TANDEM_GPU_TESTS_ON=cpu
  patience=10
fi
python=${PYTHON:-python3}
pytest=("$python" -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode importlib -v -p no:cacheprovider)
together=() # tests side by side, if pytest can
if "$python" -c 'import xdist' 2>/dev/null; then together=(-n "$(($(nproc) < 6 ? $(nproc) : 6))"); fi
failed=0

# step NAME SECONDS COMMAND...: runs a command, and records its end and its figures. Whatever its end, the next step runs.
step() {
  local name=$1 limit_s=$((patience * $2)) began=$SECONDS rc=0
  shift 2
  echo "== $name (at most $limit_s s)"
  timeout -k 10 "$limit_s" "$@" >"$out/$name.log" 2>&1 || rc=$?
  [ "$rc" = 0 ] || failed=1
  grep -E '^\{"figure"' "$out/$name.log" >>"$out/results.jsonl" || true
  printf '{"step": "%s", "rc": %d, "seconds": %d}\n' "$name" "$rc" $((SECONDS - began)) >>"$out/results.jsonl"
  tail -n 3 "$out/$name.log"
}

# needs_gpus COUNT: ends the run if torch finds fewer; with --quick, it needs none
needs_gpus() {
  step device 60 "$python" -c '
import sys
import torch
print(torch.__version__, torch.version.cuda, "nccl", torch.cuda.is_available() and torch.cuda.nccl.version())
found, needed = torch.cuda.device_count(), int(sys.argv[1])
for index in range(found):
    reached = [each for each in range(found) if each != index and torch.cuda.can_device_access_peer(index, each)]
    print(index, torch.cuda.get_device_properties(index), "reads", reached or "no other")
assert found >= needed or "--quick" in sys.argv, f"expected {needed} GPUs or more, torch finds {found}"' "$1" "${quick[@]}"
  [ "$failed" = 0 ] || report
}

# report: writes report.md, and ends the run
report() {
  "$python" - "$out" "$title" <<'PYTHON'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
steps = [each for each in lines if "step" in each]
logs = {each["step"]: (folder / f"{each['step']}.log").read_text(errors="replace").splitlines() for each in steps}
report = [f"# {sys.argv[2]}", "", "```", *logs.get("device", []), "```", ""]
report += ["| step | result | seconds |", "|---|---|---|"]
ends = {0: "passed", 124: "ran out of time", 137: "killed"}
report += [f"| {each['step']} | {ends.get(each['rc'], 'failed')} | {each['seconds']} |" for each in steps]
report += ["", "| figure | value | unit | reference | ratio |", "|---|---|---|---|---|"]
report += [
    f"| `{each['figure']}` | {each['value']} | {each['unit']} | {each['reference']} | {each['ratio']} |"
    for each in lines
    if "figure" in each
]
for each in steps:
    if each["rc"]:
        report += ["", f"## The end of {each['step']}.log", "", "```", *logs[each["step"]][-40:], "```"]
(folder / "report.md").write_text("\n".join(report) + "\n")
PYTHON
  echo "== $out/report.md"
  exit "$failed"
}
