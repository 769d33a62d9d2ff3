"""What can be fitted. Torch-free, because the command line lists it."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    MEDUSA = "medusa"
    EARLY_EXIT = "early_exit"
    EAGLE3 = "eagle3"
