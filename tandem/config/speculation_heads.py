"""Folders of trained heads, which `engine.speculation_model` names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tandem.config.engine import EngineSpec
from tandem.errors import ConfigError

HEAD_FILES: Final = {
    "medusa": "medusa_lm_head.safetensors",
    "early_exit": "early_exit.safetensors",
    "eagle3": "model.safetensors",
}


def head_folder(spec: EngineSpec, field: str = "engine.speculation_model") -> Path:
    """Raises ConfigError if it lacks the file of `spec.speculation`, which is a key of HEAD_FILES."""
    folder, file = Path(spec.speculation_model or ""), HEAD_FILES[spec.speculation]
    missing = [name for name in (file, "config.json") if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{field}: expected a folder with {file} and config.json, got {folder} without {' and '.join(missing)}",
            field=field,
        )
    return folder
