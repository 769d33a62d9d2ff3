"""Reads metrics as Prometheus does, and keeps them in the notation of `promtool test rules`.

The rules of Prometheus that alerts rest on: a target that does not answer has `up` 0 and ends all its series; a series
that is missing from a page ends; labels of the target win, and the page's own become `exported_…`.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import ssl
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]  # sorted, without the name
Key = tuple[str, Labels]  # of a series: its name first
STALE = math.nan
UNIX_TIME = "_timestamp_seconds"  # how names of metrics end whose values are points in time
DIGITS = 9
KEPT = httpx.Limits(keepalive_expiry=300.0)  # as Prometheus keeps its connections
OF_TARGET = ("instance", "job", "namespace", "pod")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Target:
    """`labels`: what service discovery knows of it. `honors`: keep the page's own labels where both name one."""

    url: str
    labels: Mapping[str, str]
    verify: ssl.SSLContext | bool = True
    honors: bool = False

    def __hash__(self) -> int:
        return hash(self.url)

    def labelled(self, own: Mapping[str, str]) -> Labels:
        if self.honors:
            return tuple(sorted({**self.labels, **own}.items()))
        renamed = {f"exported_{name}" if name in self.labels else name: value for name, value in own.items()}
        return tuple(sorted({**self.labels, **renamed}.items()))


@dataclass(slots=True)
class Series:
    """Values at every scrape since the first. None: not there. STALE: it has just ended."""

    values: list[float | None] = field(default_factory=list)

    def put(self, scrape: int, value: float) -> None:
        self.values += [None] * (scrape - len(self.values))
        self.values.append(value)

    def end(self, scrape: int) -> None:
        last = self.values[-1] if len(self.values) == scrape and self.values else None
        if last is not None and not math.isnan(last):
            self.values.append(STALE)


class Scraper:
    """Reads the targets every `interval_s`, in time with the clock: a late scrape does not move the next one.

    `names`: of the metrics to keep. Targets may come and go while it runs.
    """

    def __init__(self, names: Collection[str], interval_s: float) -> None:
        self.targets: list[Target] = []
        self.scrapes = 0
        self._names = frozenset(names)
        self._interval_s = interval_s
        self._series: dict[Key, Series] = {}
        self._began_s = time.time()
        self._of: dict[Target, set[Key]] = {}
        self._clients: dict[Target, httpx.AsyncClient] = {}  # each keeps its connection

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._began_s, began_s = time.time(), loop.time()
        try:
            while True:
                await self.scrape()
                await asyncio.sleep(max(0.0, began_s + self.scrapes * self._interval_s - loop.time()))
        finally:
            await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))

    async def scrape(self) -> None:
        targets = list(self.targets)
        pages = await asyncio.gather(*(self._page(target) for target in targets))
        for gone in [target for target in self._of if target not in targets]:
            self._end(self._of.pop(gone))
        for target, page in zip(targets, pages, strict=True):
            self._take(target, page)
        self.scrapes += 1

    async def _page(self, target: Target) -> str | None:
        """None: it does not answer as it should."""
        if target not in self._clients:
            self._clients[target] = httpx.AsyncClient(verify=target.verify, timeout=None, limits=KEPT)
        try:
            async with asyncio.timeout(self._interval_s * 2 / 3):
                answer = await self._clients[target].get(target.url)
                return answer.text if answer.status_code == 200 else None
        except (httpx.HTTPError, TimeoutError, OSError):
            return None

    def _take(self, target: Target, page: str | None) -> None:
        found = {("up", target.labelled({})): float(page is not None)}
        for family in text_string_to_metric_families(page or ""):
            for sample in family.samples:
                if sample.name in self._names:
                    since_s = self._began_s if sample.name.endswith(UNIX_TIME) else 0.0
                    found[sample.name, target.labelled(sample.labels)] = sample.value - since_s
        self._end(self._of.get(target, set()) - found.keys())
        for key, value in found.items():
            self._series.setdefault(key, Series()).put(self.scrapes, value)
        self._of[target] = set(found)

    def _end(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._series[key].end(self.scrapes)

    def series(self) -> dict[Key, str]:
        """The values of each, in promtool's notation. Points in time are seconds after the first scrape."""
        return {key: noted(each.values) for key, each in sorted(self._series.items())}


def shown(key: Key) -> str:
    """In promtool's notation."""
    name, labels = key
    inside = ", ".join(f'{label}="{value}"' for label, value in labels)
    return f"{name}{{{inside}}}"


def noted(values: Sequence[float | None]) -> str:
    """`5x3` is 5 four times, `0+2x3` is 0 2 4 6, `_x3` three scrapes without a value, `stale` the end of a series."""
    words: list[str] = []
    at = 0
    while at < len(values):
        value = values[at]
        if value is None:
            count = _run(values, at, lambda each, _: each is None)
            words.append(f"_x{count}")
        elif math.isnan(value):
            count = 1
            words.append("stale")
        else:
            step = _step(values, at)
            count = _run(values, at, lambda each, number: _is(each, value + number * step))  # noqa: B023 (called at once)
            more = f"{step:+.{DIGITS}g}" if step else ""
            words.append(number_of(value) if count == 1 else f"{number_of(value)}{more}x{count - 1}")
        at += count
    return " ".join(words)


def number_of(value: float) -> str:
    return f"{value:.{DIGITS}g}"


def _step(values: Sequence[float | None], at: int) -> float:
    """By which a run goes on for at least two more values; 0: there is none."""
    first, *rest = values[at : at + 3]
    if len(rest) < 2 or first is None or rest[0] is None or rest[1] is None:
        return 0.0
    step = rest[0] - first
    is_whole = step.is_integer() and _is(rest[1], first + 2 * step)
    return step if is_whole else 0.0


def _is(value: float | None, expected: float) -> bool:
    return value is not None and value == expected


def _run(values: Sequence[float | None], at: int, holds: Any) -> int:
    count = 1
    while at + count < len(values) and holds(values[at + count], count):
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Recording:
    """What was broken, how, and what Prometheus would have read. `fires`: every alert that fired at some time."""

    broken: str
    interval_s: float
    scrapes: int
    fires: tuple[str, ...]
    series: Mapping[Key, str]

    def write(self, path: Path) -> None:
        """Labels of targets once; values quoted, because YAML reads `0x35` as 53."""
        head = {"broken": self.broken, "interval_s": self.interval_s, "scrapes": self.scrapes, "fires": [*self.fires]}
        lines = ["# Written by scripts/record-outages.py.", yaml.safe_dump(head, sort_keys=False, width=1000).rstrip()]
        lines.append("targets:")
        by_target: dict[Labels, list[str]] = {}
        for (name, labels), values in self.series.items():
            target = tuple(each for each in labels if each[0] in OF_TARGET)
            own = tuple(each for each in labels if each[0] not in OF_TARGET)
            by_target.setdefault(target, []).append(f"      {shown((name, own))!r}: '{values}'")
        for target, series in sorted(by_target.items()):
            lines += [f"  - labels: {json.dumps(dict(target))}", "    series:", *series]
        path.write_text("\n".join([*lines, ""]))

    @classmethod
    def read(cls, path: Path) -> Recording:
        found = yaml.safe_load(path.read_text())
        series = {}
        for target in found["targets"]:
            for text, values in target["series"].items():
                name, _, inside = text.partition("{")
                own = dict(_LABEL.findall(inside))
                series[name, tuple(sorted((target["labels"] | own).items()))] = values
        return cls(found["broken"], found["interval_s"], found["scrapes"], tuple(found["fires"]), series)
