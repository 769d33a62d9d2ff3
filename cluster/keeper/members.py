"""What a member is: a group of processes that start and stop together, such as a rank with its agent, or a router."""

from __future__ import annotations

from pydantic import Field

from tandem.config.frozen import Frozen


class ProcessSpec(Frozen):
    """One process. `restart`: if it dies, it is restarted in place; without `restart` its death ends the member.

    `stop_grace_s`: seconds from SIGTERM to SIGKILL when it is stopped. `on_device`: it uses the member's device, whose
    name is appended to its arguments: `--device cuda:1`.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    restart: bool = False
    stop_grace_s: float = 5.0
    on_device: bool = False


class MemberStart(Frozen):
    """One start of a member: writes private files, then starts the processes that read them.

    `run_dir` is created with mode 0700 and removed when the member stops; `files` maps file names in it to contents.
    """

    run_dir: str
    files: dict[str, str]
    processes: tuple[ProcessSpec, ...]


class RunningProcess(Frozen):
    name: str
    pid: int


class MemberEnd(Frozen):
    """Why a member ended. `exit_code`: of the process that ended it; None if it was killed, or its host was lost."""

    reason: str
    exit_code: int | None = None


class RunningMember(Frozen):
    """A member that was started and not stopped since. `end`: why it ended; None: it runs."""

    start: MemberStart
    device: str
    processes: tuple[RunningProcess, ...] = ()
    end: MemberEnd | None = None


def is_running(member: RunningMember | None, start: MemberStart) -> bool:
    """Whether the member runs this start, which its run folder tells from others."""
    return member is not None and member.end is None and member.start.run_dir == start.run_dir
