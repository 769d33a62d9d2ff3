"""The devices that `tandem plan` compares, from --device, --mix-roles and --price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

from cluster.cli.commands.planning.inputs import HardwareFlags, load_hardware
from planner.hardware import Hardware, MixedHardware, RoleHardware
from tandem.errors import ConfigError


def load_candidates(flags: HardwareFlags, price: str | None, *, mix_roles: bool = False) -> list[RoleHardware]:
    """One for each device, of which the option may name several. `mix_roles`: then one for each pair of a device for
    prefill and another for decode. Raises ConfigError."""
    names = [flags.device] if Path(flags.device).exists() else [name.strip() for name in flags.device.split(",")]
    if "" in names:
        raise ConfigError(
            f"--device: expected devices with commas between them, such as h100,h200, got {flags.device!r}",
            field="--device",
        )
    if mix_roles:
        _check_pairs(flags, names)
    if flags.cost is not None and len(names) > 1:
        raise ConfigError(
            f"--cost: expected one --device with it, got {flags.device}: plan for one after the other", field="--cost"
        )
    prices = {} if price is None else parse_prices(price, names)
    alone = [load_hardware(replace(flags, device=name, price=prices.get(name.lower()))) for name in names]
    return [*alone, *(_pairs(alone) if mix_roles else ())]


def _check_pairs(flags: HardwareFlags, names: Sequence[str]) -> None:
    if len(names) < 2:
        raise _wrong_pairs(f"two devices or more with it, such as --device h100,h200, got --device {flags.device}")
    if flags.cost is not None:
        raise _wrong_pairs(f"no --cost with it, because {flags.cost} was measured on one device; leave out one of them")


def _pairs(alone: Sequence[Hardware]) -> list[MixedHardware]:
    """Of each two, both ways."""
    names = [each.name for each in alone]
    if twice := [name for name in names if names.count(name) > 1]:
        raise _wrong_pairs(f"devices of different names, got {twice[0]} twice: name each once in --device")
    return [MixedHardware.pair(prefill, decode) for prefill, decode in permutations(alone, 2)]


def _wrong_pairs(expected: str) -> ConfigError:
    return ConfigError(f"--mix-roles: expected {expected}", field="--mix-roles")


def parse_prices(text: str, devices: Sequence[str]) -> dict[str, float]:
    """`2.5` for the only one of `devices`, or `h100=2.5,h200=3.5` for some of them, whose names become lower case.
    Raises ConfigError."""
    known = [each.lower() for each in devices]
    if "=" not in text:
        if len(devices) > 1:
            raise _wrong(f"a price by device, such as {','.join(f'{each}=2.5' for each in devices)}", text)
        return {known[0]: _dollars(text, text)}
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, equals, dollars = part.strip().rpartition("=")
        name = name.strip().lower()
        if not equals:
            raise _wrong("DEVICE=DOLLARS with commas between them, such as h100=2.5,h200=3.5", part)
        if name not in known:
            raise _wrong(f"a device of --device ({', '.join(devices)})", name)
        if name in prices:
            raise _wrong(f"one price for {name}", text)
        prices[name] = _dollars(dollars, part)
    return prices


def _dollars(text: str, got: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise _wrong("dollars above 0, such as 2.5 or h100=2.5,h200=3.5", got)
    return value


def _wrong(expected: str, got: str) -> ConfigError:
    return ConfigError(f"--price: expected {expected}, got {got.strip()[:60]!r}", field="--price")
