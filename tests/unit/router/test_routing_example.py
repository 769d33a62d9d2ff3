"""The worked example of docs/routing.md, read from the page: its results follow from its own inputs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from router.policies.pace import BATCH_SIZES, START_PACE
from router.policies.placement import named_policy
from router.policies.predicted_times import caused_delay_s, decode_s, delay_factor, handoff_s, prefill_s, transfer_s
from router.policies.types import Candidate, Placement, PlacementQuery
from tandem.config.router import RouterSpec

PAGE = Path(__file__).parents[3] / "docs" / "routing.md"
ASK = PlacementQuery(1700, answer_tokens=100)
Row = dict[str, str]


def tables() -> dict[str, list[Row]]:
    """Those of the worked example, by the headings of their first column and, where that repeats, the second."""
    text = PAGE.read_text().partition("### A worked example")[2].partition("\n### ")[0]
    found: dict[str, list[Row]] = {}
    for block in text.split("\n\n"):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        if block.startswith("|"):
            rows = [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]
            found[" / ".join(lines[0][:2])] = rows
    return found


TABLES = tables()
DECODE_IN = TABLES["decode worker / running"]
PREFILL_IN = TABLES["prefill worker / tokens ahead"]
DECODE_OUT = TABLES["decode worker / reserve + prefill + transfer = decodes after ms"]
PREFILL_OUT = TABLES["prefill worker / prefill + transfer + 3 × computing ms"]
VARIANTS = TABLES["what is different / decode worker"]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def decode_workers() -> Iterator[Candidate]:
    for row in DECODE_IN:
        pace = replace(
            START_PACE,
            prefill_s_per_token=number(row["prefill µs/token"]) / 1e6,
            reserve_s=number(row["reserve ms"]) / 1e3,
            transfer_s_per_token=number(row["transfer µs/token"]) / 1e6,
            tpot_s=(number(row["TPOT ms with one more"]) / 1e3,) * len(BATCH_SIZES),
        )
        cached, running = int(number(row["cached tokens"])), int(number(row["running"]))
        free = int(number(row["free blocks %"]))
        yield Candidate(row["decode worker"], 1, cached, 0, 0, running, free, 100, pace=pace)


def prefill_workers() -> Iterator[Candidate]:
    for row in PREFILL_IN:
        ahead, cached = int(number(row["tokens ahead"])), int(number(row["cached tokens"]))
        to = {(f"decode-{n}", 1): number(row[f"to decode-{n} µs/token"]) / 1e6 for n in (0, 1)}
        pace = replace(START_PACE, prefill_s_per_token=number(row["prefill µs/token"]) / 1e6)
        yield Candidate(row["prefill worker"], 1, cached, ahead, ahead, 0, 100, 100, pace=pace, transfer_to=to)


POLICY = named_policy(RouterSpec())
DECODE, PREFILL = list(decode_workers()), list(prefill_workers())


def ms(*seconds: float) -> str:
    return " + ".join(f"{1e3 * each:,.0f}" for each in seconds)


def test_decode_workers_times_and_points() -> None:
    soonest_s = min(prefill_s(ASK, each) for each in PREFILL)
    times_s = [handoff_s(ASK, each, soonest_s) + decode_s(ASK, each) for each in DECODE]
    for row, each, time_s in zip(DECODE_OUT, DECODE, times_s, strict=True):
        parts = ms(each.pace.reserve_s, soonest_s, transfer_s(ASK, each))
        points = min(times_s) / time_s
        assert list(row.values()) == [
            each.worker_id,
            f"{parts} = {ms(handoff_s(ASK, each, soonest_s))}",
            ms(decode_s(ASK, each)),
            ms(time_s),
            f"{points:.3f}",
            f"{points + 0.2 * each.free_blocks / 100:.3f}",
            f"{points + 0.2 * each.free_blocks / 100 + 0.1 * (1 - each.running_requests / (11 + 8)):.3f}",
        ]
    asked = structs.replace(ASK, prefill_s=soonest_s)
    totals = [sum(w * s.points(asked, DECODE)[n] for s, w in POLICY.decode.scores) for n in (0, 1)]
    assert [f"{total:.3f}" for total in totals] == [row["and batches"] for row in DECODE_OUT]


def test_prefill_workers_times_and_points() -> None:
    decode, factor = DECODE[1], delay_factor(PREFILL)
    parts_s = [
        (prefill_s(ASK, each), transfer_s(ASK, decode, each), caused_delay_s(ASK, each, factor)) for each in PREFILL
    ]
    shortest_s = min(sum(parts) for parts in parts_s)
    for row, each, parts in zip(PREFILL_OUT, PREFILL, parts_s, strict=True):
        points = f"{shortest_s / sum(parts):.3f}"
        assert list(row.values()) == [each.worker_id, f"{ms(*parts)} = {ms(sum(parts))}", points]
    totals = POLICY.prefill.scores[0][0].points(structs.replace(ASK, decode=decode), PREFILL)
    assert [f"{total:.3f}" for total in totals] == [row["points"] for row in PREFILL_OUT]


CHANGES: dict[str, tuple[str, dict[str, int], float | None]] = {
    "nothing": ("", {}, None),
    "6,000 tokens ahead on prefill-0": ("prefill-0", {"outstanding_tokens": 6000, "dispatched_tokens": 0}, None),
    "1,600 tokens cached on decode-1": ("decode-1", {"cached_tokens": 1600}, None),
    "1,680 tokens cached on decode-1": ("decode-1", {"cached_tokens": 1680}, None),
    "1,000 tokens ahead on prefill-0": ("prefill-0", {"outstanding_tokens": 1000, "dispatched_tokens": 1000}, None),
    "5 running on decode-0, at 18 ms": ("decode-0", {"running_requests": 5}, 0.018),
    "none running on decode-0, at 15 ms": ("decode-0", {"running_requests": 0}, 0.015),
}


def first_token_s(placed: Placement) -> float:
    """The first token does not wait for the transfer."""
    reserve_s = 0.0 if placed.prefill is None else placed.decode.pace.reserve_s
    return reserve_s + prefill_s(ASK, placed.prefiller)


@pytest.mark.parametrize("row", VARIANTS, ids=lambda row: row["what is different"])
def test_decision(row: Row) -> None:
    name, fields, tpot_s = CHANGES[row["what is different"]]

    def changed(worker: Candidate) -> Candidate:
        if worker.worker_id != name:
            return worker
        pace = worker.pace if tpot_s is None else replace(worker.pace, tpot_s=(tpot_s,) * len(BATCH_SIZES))
        return structs.replace(worker, pace=pace, **fields)

    placed = POLICY.place(ASK, [changed(each) for each in DECODE], [changed(each) for each in PREFILL])
    assert isinstance(placed, Placement)
    first_token = ms(first_token_s(placed))
    seen = [placed.decode.worker_id, placed.prefiller.worker_id, placed.reason.value, first_token]
    assert seen == list(row.values())[1:]


def test_every_variant_of_the_page_is_one_of_these() -> None:
    assert [row["what is different"] for row in VARIANTS] == list(CHANGES)
