"""Output that no reader and no disk can make wait or fail."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cluster.keeper.lossy_output import LossyOutput

LINE = "x" * 1000 + "\n"


def written(output: LossyOutput, lines: int) -> float:
    """How long the writes took, in seconds."""
    started_s = time.monotonic()
    for _ in range(lines):
        assert output.write(LINE) == len(LINE)
    output.flush()
    return time.monotonic() - started_s


def test_what_is_read_is_whole_and_in_order() -> None:
    reader, writer = os.pipe()
    output = LossyOutput(writer, "utf-8")
    output.write("a\u00e9\n")
    output.write("b\n")
    output.finish(timeout_s=60)
    os.close(writer)
    with open(reader, encoding="utf-8") as read:
        assert read.read() == "a\u00e9\nb\n"


def test_what_its_encoding_lacks_is_replaced() -> None:
    reader, writer = os.pipe()
    output = LossyOutput(writer, "ascii")
    output.write("a\u00e9\n")
    output.finish(timeout_s=60)
    os.close(writer)
    with open(reader, encoding="ascii") as read:
        assert read.read() == "a?\n"


def test_a_reader_that_stops_reading_does_not_stop_the_writer() -> None:
    reader, writer = os.pipe()
    output = LossyOutput(writer, "utf-8", kept_bytes=4000)
    assert written(output, 500) < 30.0  # 0.5 MB into a pipe of 64 KiB
    started_s = time.monotonic()
    output.finish(timeout_s=0.1)
    assert time.monotonic() - started_s < 30.0
    os.close(reader)
    os.close(writer)


def test_what_was_not_read_in_time_is_counted_where_it_is_missing() -> None:
    reader, writer = os.pipe()
    output = LossyOutput(writer, "utf-8", kept_bytes=100_000)
    written(output, 500)
    with open(reader, encoding="utf-8") as read:
        kept = dropped = 0
        while kept + dropped < 500:
            if (line := read.readline()) == LINE:
                kept += 1
            else:
                count, said = line.split(" ", 1)
                assert said == "lines were dropped here: nothing read them in time\n"
                dropped += int(count)
        assert dropped
        assert kept >= 99
        output.write("on\n")
        output.finish(timeout_s=60)
        os.close(writer)
        assert read.read() == "on\n"
    assert kept * len(LINE) <= 100_000 + (1 << 17), "and a pipe's 64 KiB"


def test_a_pipe_without_a_reader_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = LossyOutput(writer, "utf-8")
    written(output, 10)
    output.finish(timeout_s=60)
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_no_error() -> None:
    with open("/dev/full", "w") as full:
        output = LossyOutput(full.fileno(), "utf-8")
        written(output, 10)
        output.finish(timeout_s=60)


SCRIPT = textwrap.dedent(
    """
    import asyncio, logging, sys
    from cluster.cli.console import console
    from cluster.keeper.lossy_output import lossy_output

    async def main():
        screen = console()
        for number in range(200):
            screen.print(f"[dim]{number}[/] " + "x" * 1000)
            logging.warning("a warning of 1000 characters: %s", "x" * 1000)
            await asyncio.sleep(0)
        with open(sys.argv[1], "w") as done:
            done.write("all")

    with lossy_output():
        asyncio.run(main())
    """
)


@pytest.mark.parametrize("reader", ["closed", "blocked", "full"])
def test_a_program_with_the_real_console_and_log_runs_to_its_end(tmp_path: Path, reader: str) -> None:
    done = tmp_path / "done"
    command = [sys.executable, "-c", SCRIPT, str(done)]
    reading, writing = os.pipe()
    if reader == "full":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    if reader == "closed":
        os.close(reading)
    with subprocess.Popen(command, stdout=writing, stderr=writing) as process:
        os.close(writing)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
            if reader != "closed":
                os.close(reading)
    assert done.read_text() == "all"
