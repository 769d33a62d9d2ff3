"""Formats counts and sizes for people."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """`1 device`, `2 devices`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def size(count_bytes: float | None) -> str:
    """A transferred size in decimal units, as is usual for links. (Memory sizes are in MiB.)"""
    if count_bytes is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count_bytes >= scale:
            return f"{count_bytes / scale:.{0 if count_bytes >= 100 * scale else 1}f} {unit}"
    return f"{count_bytes:.0f} B"
