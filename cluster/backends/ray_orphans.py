"""Ends what a local Ray leaves behind when the process that started it is killed: Ray's own agents stay for a minute.

Run by a bare interpreter, `python -I -S FILE FOLDER HEAD KEEPER`, so it imports the standard library only. It waits for
the end of its stdin, whose other end HEAD holds, then kills every process that writes to a file of its Ray session.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import sys
import time
from pathlib import Path

WATCH_S = 10.0  # a process that is starting has none open yet
POLL_S = 0.2


def pids_of(session: str, keeper: int) -> list[int]:
    """The processes that have a file of this session of Ray open for writing, as all of Ray's have their logs. A
    process that only reads one, or removes the folder, is none of them; nor is a child of the keeper: a controller ends
    by itself, and says why."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended, or is another user's
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            files = (os.readlink(each) for each in (process / "fd").iterdir() if each.lstat().st_mode & stat.S_IWUSR)
            if parent != keeper and any(re.match(session, file) for file in files):
                found.append(int(process.name))
    return found


def main(folder: str, head: int, keeper: int) -> None:
    while sys.stdin.buffer.read(1):
        pass
    session = rf"{re.escape(folder)}/session_[^/]*_{head}/"  # the next head has the same folder
    deadline_s = time.monotonic() + WATCH_S
    while time.monotonic() < deadline_s:
        for pid in pids_of(session, keeper):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
