"""Exit codes by which a rank's process tells the controller more than that it ended."""

from __future__ import annotations

from typing import Final

GPU_LOST_EXIT_CODE: Final = 74
