"""`tandem profile` measures a real engine, and what it writes is a cost model that the simulator runs on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.commands.planning.inputs import HardwareFlags, load_hardware
from cluster.cli.commands.planning.profile import as_in_a_worker, run_profile
from cluster.cli.commands.planning.running_pair import RunningPair, cpu_clock
from cluster.cli.main import app
from cluster.profiling.profiler import BESIDE_CHUNKS, FixedWork, Grid, open_profiler
from planner.fitted import (
    DecodePoint,
    Measurements,
    MixedPoint,
    PrefillPoint,
    read_host,
    read_mask_s_per_row,
    read_measured,
)
from planner.shapes import LinkShape
from planner.shared_host import HostCores
from tandem.config.engine import EngineSpec
from tandem.engine.api import Engine
from tandem.errors import ConfigError
from tandem.testing.models import write_tiny_llama

GRID = Grid(chunks=(16, 32, 64), batches=(1, 2, 4), contexts=(16, 48))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_llama(folder, eos_token_id=2)
    return folder


@pytest.mark.slow
def test_steps_are_measured_and_simulated_with(model: Path, tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    assert run_profile(None, str(model), "cpu", cost, GRID) == 0
    (measured,) = read_measured(cost).values()
    assert measured.fit_error is not None
    assert measured.prefill_s(64, 0) >= measured.prefill_s(16, 0) > 0
    assert measured.decode_step_s(4, 100) >= measured.decode_step_s(1, 100) > 0
    traffic = ["synthetic", "--arrivals", "poisson:5", "--lengths", "30:5", "--requests", "20"]
    hardware = ["--model", str(model), "--cost", str(cost), "--element-bytes", "4"]
    result = CliRunner().invoke(app, ["simulate", *traffic, *hardware])
    assert result.exit_code == 0, result.output
    assert "mean fit error" in result.stdout
    masks_s = read_mask_s_per_row(cost)
    assert masks_s is not None
    assert 0 <= masks_s < 0.01
    masked = load_hardware(HardwareFlags(str(model), "cpu", str(cost), constrained=0.5))
    more_s = masked.cost(1).decode_step_s(4, 100) - measured.decode_step_s(4, 100)
    assert more_s == pytest.approx(0.5 * 4 * masks_s)
    host = read_host(cost)
    assert host.cores == len(os.sched_getaffinity(0))
    assert host.contention.most >= 1
    shared = CliRunner().invoke(app, ["simulate", *traffic, *hardware, "--one-host"])
    assert shared.exit_code == 0, shared.output
    assert f"{host.cores} ranks run in parallel" in shared.stdout


def test_one_host_needs_what_was_measured_of_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text('{"widths": []}')
    with pytest.raises(ConfigError, match=r"cost.json: expected a `host` entry"):
        load_hardware(HardwareFlags(str(model), "cpu", str(tmp_path / "cost.json"), one_host=True))
    (tmp_path / "older.json").write_text('{"widths": [], "host": {"cores": 2, "contention": 1.2}}')
    with pytest.raises(ConfigError, match=r"older.json: host: expected what this version of `tandem profile` writes"):
        read_host(tmp_path / "older.json")
    with pytest.raises(ConfigError, match="--one-host: expected --cost"):
        load_hardware(HardwareFlags(str(model), "cpu", one_host=True))


def test_a_pool_too_small_to_measure_in_says_so(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    engine = {"kv_blocks": 8, "block_tokens": 8}
    config.write_text(yaml.safe_dump({"models": [{"source": str(model), "engine": engine}]}))
    with pytest.raises(ConfigError, match="too few to profile"):
        run_profile(config, None, "cpu", tmp_path / "cost.json", Grid((16,), (16,), (48,)))


def test_a_host_without_memory_for_neighbours_keeps_what_was_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = tmp_path / "cost.json"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1 << 20)))
    assert run_profile(None, str(model), "cpu", cost, GRID) == 0
    assert "contention not measured" in capsys.readouterr().err
    assert read_measured(cost)
    with pytest.raises(ConfigError, match="found none"):
        read_host(cost)


def test_steps_that_a_short_context_has_no_room_for_are_left_out(model: Path) -> None:
    spec = EngineSpec(max_model_tokens=200, kv_blocks=512, threads_per_rank=1)
    with open_profiler(model, spec, Grid((64, 512), (8,), (16,))) as profiler:
        assert {point.tokens for point in profiler.mixed(lambda _: None)} == {
            each for each in BESIDE_CHUNKS if each < 199
        }


def test_a_machine_that_changes_its_speed_does_not_change_what_is_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = 1.0

    def timed(engine: Engine) -> float:
        nonlocal speed
        speed *= 1.02
        return len(engine.step().tokens) * speed

    monkeypatch.setattr("cluster.profiling.profiler._timed", timed)
    spec = EngineSpec(max_model_tokens=200, kv_blocks=512, threads_per_rank=1)
    with open_profiler(model, spec, Grid((16,), (1, 2, 4, 8), (16, 48))) as profiler:
        points = profiler.decodes(lambda _: None)
    took = [each.seconds / each.batch for each in points]
    assert max(took) / min(took) < 1.2
    assert speed > 2.0
    with open_profiler(model, EngineSpec(max_model_tokens=20, kv_blocks=9, block_tokens=8), Grid()) as profiler:
        assert all(each > 0 for each in profiler.fixed_work())


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' clocks of processes")
def test_cpu_time_includes_threads_that_ended() -> None:
    code = "import threading, time; t = threading.Thread(target=sum, args=(range(10**7),)); t.start(); t.join()"
    command = [sys.executable, "-c", f"{code}; own = time.process_time(); print(own, flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        own_s = float(process.stdout.readline())
        assert own_s <= time.clock_gettime(cpu_clock(process.pid)) < own_s + 0.5
        process.communicate("\n")


def test_steps_take_as_long_as_in_a_running_worker(capsys: pytest.CaptureFixture[str]) -> None:
    prefills = [PrefillPoint(tokens, 0, 0.01 + 1e-4 * tokens) for tokens in (16, 64, 256, 512)]
    decodes = [DecodePoint(batch, batch * 64, 0.004 + 1e-4 * batch) for batch in (1, 4, 16)]
    alone = Measurements(prefills, decodes, LinkShape(1e9), [MixedPoint(64, 4, 256, 0.0182)])

    def found(prefill: float, decode: float) -> Measurements:
        slower = FixedWork(prompts_s=1.3, decoding_s=0.7)  # than usual, while the pair was measured
        pair = RunningPair(HostCores(2), 0.7 * decode * 0.0041, 64, 1.3 * prefill * 0.0256)
        return as_in_a_worker(alone, pair, slower, print)

    slower = found(1.1, 0.9)
    assert [each.seconds for each in slower.prefills] == pytest.approx(
        [1.1 * each.seconds for each in prefills], rel=0.03
    )
    assert [each.seconds for each in slower.decodes] == pytest.approx([0.9 * each.seconds for each in decodes])
    assert slower.mixed[0].seconds == pytest.approx(1.1 * 0.0164 + 0.9 * 0.0018, rel=0.03)
    assert "decode steps 0.900 times as long" in capsys.readouterr().out
    assert found(0.2, 1.0) is alone
    assert "which is not believed" in capsys.readouterr().out
