"""Whatever comes in whichever order: right content, no starvation, no leak."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.errors import ContextExceeded, KvExhausted
from tandem.scheduler.batching import BatchRule
from tandem.scheduler.sequence import Sequence, SequenceStage

BLOCK = 4

ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["add", "uncached", "export", "reserve"]),
            st.integers(1, 30),  # prompt tokens
            st.integers(0, 2),  # which of three texts, so that prefixes are shared
            st.integers(2, 20),  # max_tokens, or the block to export from
        ),
        st.tuples(st.sampled_from(["step", "cancel", "join", "release"]), st.integers(0, 10)),
    ),
    max_size=60,
)


class Story:
    """Plays actions and keeps count of which requests are still to end."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.alive: dict[str, Sequence] = {}
        self.expected: dict[str, int] = {}
        self.names = 0

    def play(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("add" | "uncached" | "export" | "reserve" as kind, length, text, number):
                self.start(kind, [text * 1000 + index for index in range(length)], number)
            case ("step", count):
                for _ in range(count):
                    self.step()
            case ("cancel", index) if self.alive:
                name = sorted(self.alive)[index % len(self.alive)]
                assert self.world.cancel(name)
                self.forget(name)
            case ("join", index) if reserved := self.at(SequenceStage.RESERVED):
                self.world.fill(reserved[index % len(reserved)])
            case ("release", index) if exported := self.at(SequenceStage.EXPORTED):
                self.release(exported[index % len(exported)])

    def start(self, kind: str, prompt: list[int], number: int) -> None:
        self.names += 1
        name = f"{self.names:03}"
        try:
            if kind == "reserve":
                self.alive[name] = self.world.reserve(name, prompt, number)
                self.expected[name] = number - 1
            elif kind == "export":
                self.alive[name] = self.world.add(name, prompt, export_from_block=number % 4)
                self.expected[name] = 1
            else:
                self.alive[name] = self.world.add(name, prompt, number, use_prefix_cache=kind == "add")
                self.expected[name] = number
        except (KvExhausted, ContextExceeded):
            pass  # no room: the pool must be as before, which conservation checks

    def at(self, stage: SequenceStage) -> list[Sequence]:
        return [self.alive[name] for name in sorted(self.alive) if self.alive[name].stage is stage]

    def step(self) -> None:
        self.world.step()
        assert self.world.pool.counts().conserved
        assert self.world.pool.tier_counts().conserved
        for name, sequence in list(self.alive.items()):
            done = not sequence.is_exporting and sequence.generated >= sequence.sampling.max_tokens
            if name in self.world.failed or done:
                self.alive.pop(name)

    def forget(self, name: str) -> None:
        self.alive.pop(name)
        self.expected.pop(name)

    def release(self, sequence: Sequence) -> None:
        ranges = self.world.ranges.get(sequence.request_id, [])
        covered = [block for r in ranges for block in range(r.first_block, r.first_block + len(r.block_ids))]
        assert sequence.export_from_block is not None
        assert covered == list(range(sequence.export_from_block, -(-sequence.prompt_tokens // BLOCK)))
        assert [r.is_last for r in ranges] == [False] * (len(ranges) - 1) + [True] * bool(ranges)
        self.world.release(sequence.request_id)
        self.alive.pop(sequence.request_id)

    def finish(self) -> None:
        """Everyone's turn comes: handoffs end, and all that remains runs to its end in a bounded number of steps."""
        for _ in range(3000):
            for sequence in self.at(SequenceStage.RESERVED):
                self.world.fill(sequence)
            for sequence in self.at(SequenceStage.EXPORTED):
                self.release(sequence)
            if not self.alive:
                break
            self.world.wait()
            assert self.world.scheduler.has_work
            self.step()
        assert not self.alive
        for name, count in self.expected.items():
            if name not in self.world.failed:
                assert len(self.world.answers.get(name, [])) == count
        assert self.world.at_rest()


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=ACTIONS,
    blocks=st.integers(4, 20),
    budget=st.integers(1, 20),
    max_running=st.integers(1, 5),
    slots=st.sampled_from([0, 0, 1, 3, 10, 40]),
    proposes=st.sampled_from(["", "chains", "trees"]),
    window_s=st.sampled_from([None, None, 0.0, 0.03, 1.0]),
    from_first=st.booleans(),
)
def test_every_request_ends_with_the_right_content_and_nothing_is_left_behind(
    make_world: Any,
    actions: list[tuple[Any, ...]],
    blocks: int,
    budget: int,
    max_running: int,
    slots: int,
    proposes: str,
    window_s: float | None,
    from_first: bool,
) -> None:
    batches = None if window_s is None else BatchRule(max_running, window_s, from_first)
    story = Story(
        make_world(
            blocks=blocks,
            budget=budget,
            max_running=max_running,
            slots=slots,
            proposes=bool(proposes),
            branches=proposes == "trees",
            batches=batches,
        )
    )
    for action in actions:
        story.play(action)
    story.finish()
