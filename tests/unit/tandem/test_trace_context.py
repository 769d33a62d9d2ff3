"""W3C trace context, as its recommendation has it (https://www.w3.org/TR/trace-context/)."""

import pytest

from tandem.telemetry.trace_context import TraceContext, TraceSampler, parse_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

NO_HEADERS: dict[str, str] = {}


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # further flags mean nothing here
        (f"cc-{TRACE}-{SPAN}-01", True),  # a later version, read as far as it is known
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be", True),
    ],
)
def test_a_context_as_it_should_be_is_read(header: str, sampled: bool) -> None:
    assert parse_context(header, "vendor=1") == TraceContext(TRACE, SPAN, sampled, "vendor=1")


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01.",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f" 00-{TRACE}-{SPAN}-01",
        "x" * 10_000,
    ],
)
def test_any_other_is_as_if_there_were_none(header: str) -> None:
    assert parse_context(header, None) is None


@pytest.mark.parametrize("state", [None, "", "a=" + "b" * 600, "line\nbreak"])
def test_a_state_that_is_none_leaves_the_parent_as_it_is(state: str | None) -> None:
    assert parse_context(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, True, "")


def test_a_callers_word_counts_whatever_the_ratio() -> None:
    for ratio in (None, 0.0, 1.0):
        sampler = TraceSampler(ratio)
        asked = sampler.context({"traceparent": f"00-{TRACE}-{SPAN}-01"}.get)
        refused = sampler.context({"traceparent": f"00-{TRACE}-{SPAN}-00"}.get)
        assert asked is not None
        assert refused is not None
        assert (asked.sampled, refused.sampled) == (True, False)


def test_without_a_caller_the_ratio_decides_and_every_trace_is_another() -> None:
    assert all(TraceSampler(ratio).context(NO_HEADERS.get) is None for ratio in (None, 0.0))
    begun = [TraceSampler(1.0).context(NO_HEADERS.get) for _ in range(50)]
    assert all(each is not None and each.sampled and each.parent_id is None for each in begun)
    assert len({each.trace_id for each in begun if each is not None}) == 50
    some = TraceSampler(0.2)
    assert 100 < sum(some.context(NO_HEADERS.get) is not None for _ in range(1000)) < 300
    malformed = TraceSampler(1.0).context({"traceparent": "nonsense"}.get)
    assert malformed is not None
    assert malformed.parent_id is None
