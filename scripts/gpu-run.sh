# What first-gpu-run.sh and two-gpu-run.sh share: bounded steps, and a report of them. Source it with the folder as argument.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
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


# needs_gpus COUNT: ends the run if torch finds fewer
needs_gpus() {
  step device 60 "$python" -c '
import sys
import torch
print(torch.__version__, torch.version.cuda, "nccl", torch.cuda.is_available() and torch.cuda.nccl.version())
found, needed = torch.cuda.device_count(), int(sys.argv[1])
for index in range(found):
    print(index, torch.cuda.get_device_properties(index))
assert found >= needed, f"expected {needed} GPUs or more, torch finds {found}"' "$1"
  [ "$failed" = 0 ] || exit 1
}

# report TITLE: writes report.md, and ends the run
report() {
  "$python" - "$out" "$1" <<'PYTHON'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
report = [f"# {sys.argv[2]}", "", "```", (folder / "device.log").read_text().strip(), "```", ""]
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
}
