"""`python -m router --launch FILE`: one router process, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import uvloop

from router.app import RouterApp
from tandem.config.launch import RouterLaunch
from tandem.errors import ConfigError
from tandem.telemetry.logs import setup_logging

EXIT_CONFIG = 2
PR_SET_PDEATHSIG = 1
GC_ALLOCATIONS = 20_000  # net new objects between two collections
SWITCH_S = 0.0005  # how long a thread that parses or formats may keep the event loop waiting; Python's default: 5 ms


async def serve(launch: RouterLaunch) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if launch.drains_as_orphan:  # its parent had set SIGKILL
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    app = RouterApp(launch)
    await app.start()
    let_threads_wait()
    gc.collect()
    gc.freeze()  # otherwise each full collection scans all modules, for tens of ms
    gc.set_threshold(GC_ALLOCATIONS, 10, 20)
    await stop.wait()
    await app.close()


def let_threads_wait() -> None:
    """No other thread of this process interrupts the event loop's when it wakes, as gRPC's do for every message. Nor do
    the threads that they start."""
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != threading.main_thread().native_id:
            with suppress(OSError):  # it has ended, or this is not allowed here
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m router", description="One Tandem router.")
    parser.add_argument("--launch", type=Path, required=True, help="the RouterLaunch JSON file")
    launch = RouterLaunch.load(parser.parse_args().launch)
    sys.setswitchinterval(SWITCH_S)
    setup_logging(launch.log_level, process=launch.router_id, log_format=launch.observability.logs.format)
    try:
        uvloop.run(serve(launch))
    except ConfigError as error:
        logging.getLogger("router").error(error.message)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
