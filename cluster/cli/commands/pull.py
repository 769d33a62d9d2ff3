"""`tandem pull`: downloads a model once, so that later starts are fast."""

from __future__ import annotations

import signal

from cluster.cli.console import console
from cluster.spec.requirements import origin_of
from tandem.checkpoint.model_config import ModelConfig
from tandem.checkpoint.model_store import pull
from tandem.errors import ConfigError


def run_pull(model: str, volume_bytes: int | None) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an interrupted download removes its partial files
    screen = console()
    try:
        folder = pull(model, progress=lambda what: screen.print(f"[dim]{what}[/]"), volume_bytes=volume_bytes)
    except ConfigError as error:
        if "HF_TOKEN" in error.message and (origin := origin_of("HF_TOKEN")) is not None:
            error.message += f"; HF_TOKEN comes from {origin}"
        raise
    config = ModelConfig.of_any(folder)
    screen.print(f"[green]{model}[/] is in {folder}", soft_wrap=True)
    screen.print(
        f"{config.layers} layers, {config.heads} heads, {config.kv_heads} KV heads, context "
        f"{config.max_position_tokens}; possible tensor-parallel widths: {', '.join(map(str, config.fitting_tps()))}"
    )
    if not config.is_ours:
        screen.print(f"{config.architecture} runs by another engine: set engine.kind: vllm")
    return 0
