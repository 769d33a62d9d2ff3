"""`python -m router --launch FILE`: one router process, until SIGTERM or SIGINT.

`python -m router --join HOST:PORT --name NAME`: one that no controller started (`router.joining`). When its settings
change it ends its requests, and this process starts it anew.
"""

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
from router.joining import JoinOptions, Membership, add_arguments
from tandem.config.launch import RouterLaunch
from tandem.errors import ConfigError
from tandem.telemetry.logs import setup_logging

EXIT_CONFIG = 2
PR_SET_PDEATHSIG = 1
GC_ALLOCATIONS = 200_000  # net new objects between two collections, which take up to 30 ms and find hardly any garbage
SWITCH_S = 0.0005  # how long a thread that parses or formats may keep the event loop waiting; Python's default: 5 ms


async def serve(launch: RouterLaunch) -> None:
    stop = stop_event()
    if launch.drains_as_orphan:  # its parent had set SIGKILL
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    app = await start(launch)
    await stop.wait()
    await app.close()


async def serve_joined(options: JoinOptions) -> bool:
    """Whether it ended to start again, with other settings."""
    membership, stop = Membership(options), asyncio.create_task(stop_event().wait())
    joining, changing = asyncio.ensure_future(membership.join()), asyncio.create_task(membership.changed.wait())
    try:
        await asyncio.wait((joining, stop), return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            return False
        launch = joining.result()
        setup_logging(launch.log_level, process=launch.router_id, log_format=launch.observability.logs.format)
        app = await start(launch)
        await asyncio.wait((changing, stop), return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            app.leave()
            await asyncio.wait((stop,), timeout=options.leave_s)
        await app.close()
        return not stop.done()
    finally:
        for task in (joining, changing, stop):
            task.cancel()
        await membership.close()


def stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def start(launch: RouterLaunch) -> RouterApp:
    app = RouterApp(launch)
    await app.start()
    let_threads_wait()
    gc.collect()
    gc.freeze()  # otherwise each full collection scans all modules, for tens of ms
    gc.set_threshold(GC_ALLOCATIONS, 10, 20)
    return app


def let_threads_wait() -> None:
    """No other thread of this process interrupts the event loop's when it wakes, as gRPC's do for every message. Nor do
    the threads that they start."""
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != threading.main_thread().native_id:
            with suppress(OSError):  # it has ended, or this is not allowed here
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def given_to_join(given: argparse.Namespace) -> list[str]:
    """The options of `--join` that say something else than their default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([])).items()
    return [f"--{name.replace('_', '-')}" for name, default in defaults if getattr(given, name) != default]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m router", description="One Tandem router.")
    parser.add_argument("--launch", type=Path, metavar="FILE", help="the RouterLaunch JSON file")
    add_arguments(parser)
    given = parser.parse_args()
    if (given.launch is None) == (given.join is None):
        parser.error("expected either --launch or --join")
    if given.launch is not None and (unused := given_to_join(given)):
        parser.error(f"{unused[0]}: expected together with --join: with --launch, the file says it")
    sys.setswitchinterval(SWITCH_S)
    try:
        if given.launch is not None:
            launch = RouterLaunch.load(given.launch)
            setup_logging(launch.log_level, process=launch.router_id, log_format=launch.observability.logs.format)
            uvloop.run(serve(launch))
        else:
            setup_logging(process=given.name or "router")
            if uvloop.run(serve_joined(JoinOptions.parse(given))):
                logging.getLogger("router").info("the settings have changed: starting again")
                logging.shutdown()
                os.execv(sys.executable, [sys.executable, "-m", "router", *sys.argv[1:]])
    except ConfigError as error:
        logging.getLogger("router").error(error.message)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
