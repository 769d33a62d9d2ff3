"""Other engines as separate processes, in the virtual environments that `scripts/engine-peers.sh` creates."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".cache" / "peers"


@dataclass(frozen=True, slots=True)
class PeerTimes:
    """Seconds until every prompt has its first token, and the median of the later steps."""

    first_s: float
    step_s: float


class EnginePeer:
    """A peer process. It answers one line per request and is idle in between, so it takes no core from Tandem."""

    def __init__(self, command: Sequence[str]) -> None:
        # Peers choose their own number of threads: drop the variables that limit Tandem to one.
        env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        self._answer()

    def __enter__(self) -> EnginePeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> PeerTimes:
        """Generates `tokens` tokens for each prompt. The prompts have the same length."""
        if self._process.stdin is None:
            raise RuntimeError("the peer process has no standard input")
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return PeerTimes(float(answer["first_s"]), float(answer["step_s"]))

    def _answer(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("the peer process has no standard output")
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the peer process exited with status {self._process.wait()}")


def find_peers(threads: int, folder: Path) -> dict[str, EnginePeer]:
    """Starts the installed peers, by name. `folder`: the checkpoint, for peers that do not read GGUF files."""
    model = PEERS / "model"
    scripts = {
        "openvino": ("engine_openvino.py", model / "model.gguf"),
        "llama_cpp": ("engine_llamacpp.py", model / "model-q4_0.gguf"),
        "vllm": ("engine_vllm.py", folder),
    }
    found = {name: _start(name, script, path, threads) for name, (script, path) in scripts.items()}
    return {name: peer for name, peer in found.items() if peer is not None}


def find_pair(threads: int, folder: Path) -> EnginePeer | None:
    """Starts vLLM as a prefill and a decode engine; None if it is not installed."""
    return _start("vllm", "engine_vllm.py", folder, threads, "pair")


def _start(name: str, script: str, model: Path, threads: int, *more: str) -> EnginePeer | None:
    python = PEERS / name / "bin" / "python"
    if not (python.exists() and model.exists()):
        return None
    return EnginePeer([str(python), str(Path(__file__).with_name(script)), str(model), str(threads), *more])
