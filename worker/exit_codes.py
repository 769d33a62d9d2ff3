"""Exit codes by which a worker's process tells the controller more than that it ended."""

from __future__ import annotations

from typing import Final

GPU_LOST_EXIT_CODE: Final = 74
ENGINE_HUNG_EXIT_CODE: Final = 75  # of the service process: its engine hangs
WRONG_CONFIG_EXIT_CODE: Final = 78  # of a rank: started again, it would end so again
