"""Where the `tandem` command begins: the signal handling that must be there before its modules load."""

from __future__ import annotations

import signal


def main() -> None:
    # An interrupt inside an import may get lost or end in a traceback. Nothing runs yet, so Ctrl-C ends the process at
    # once; commands that have something to end install their own handlers.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from cluster.cli.main import main as run  # noqa: PLC0415 - takes long enough to be interrupted

    run()
