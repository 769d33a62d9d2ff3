"""Random loads, much more than fit: nothing leaks and nobody starves. `make soak` does eight hours' worth of steps."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import psutil
import pytest

from tandem.request import SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt, write_tiny_llama

VOCAB = 300
STEPS = 600_000 if os.environ.get("TANDEM_SOAK") else 600  # eight hours of 50 ms each
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, head size, fp32
GROWTH_BYTES = 24 << 20
# A request is overtaken only by older ones; those in the engine at a time need at most so many steps together.
PATIENCE_STEPS = 1_500


@pytest.mark.soak
@pytest.mark.parametrize("slots", [pytest.param(0, marks=pytest.mark.slow), 100])
def test_random_loads_leak_nothing_and_starve_nobody(tmp_path: Path, slots: int) -> None:
    rank = single_rank(
        write_tiny_llama(tmp_path / "m", vocab=VOCAB),
        tmp_path / "r",
        kv_blocks=24,
        max_step_tokens=48,
        host_kv_memory_bytes=slots * BLOCK_BYTES,
    )
    engine, driver, draw = rank.engine, EngineDriver(rank.engine), random.Random(3)
    process, alive, count = psutil.Process(), dict[str, int](), 0
    warm: tuple[int, int] | None = None
    for step in range(STEPS):
        while len(alive) < 12 and draw.random() < 0.4:
            name, count = str(count), count + 1
            prompt = random_prompt(draw.randint(1, 120), VOCAB, draw.randrange(40))
            sampling = SamplingParams(temperature=draw.choice([0.0, 0.9]), seed=count, max_tokens=draw.randint(1, 60))
            driver.add(name, prompt, sampling, use_prefix_cache=draw.random() < 0.8)
            alive[name] = step
        driver.take(engine.step())
        if alive and draw.random() < 0.01:
            engine.cancel(gone := draw.choice(list(alive)))
            del alive[gone]
        for name in driver.ends:
            alive.pop(name, None)
        load = engine.load()
        assert load.blocks.conserved
        assert load.host.conserved
        assert all(step - began < PATIENCE_STEPS for began in alive.values())
        for kept in (driver.tokens, driver.ends, driver.cached):
            kept.clear()
        engine.take_cache_events()
        if step == STEPS // 3:
            gc.collect()
            warm = process.memory_info().rss, process.num_fds()
    driver.run()
    gc.collect()
    assert driver.at_rest()
    assert engine.preemptions > STEPS / 100
    assert engine.load().host.total == slots
    assert (engine.load().host.blocks_in > STEPS / 40) is (slots > 0)
    assert warm is not None
    assert process.memory_info().rss - warm[0] < GROWTH_BYTES
    assert process.num_fds() <= warm[1]
