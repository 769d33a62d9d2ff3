"""The folder for models, compiled kernels and other artefacts that Tandem can recreate."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`TANDEM_CACHE`, or `tandem` in the user's cache folder."""
    own = os.environ.get("TANDEM_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
