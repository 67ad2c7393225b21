"""Kills a JobManager in the midst of something, as ``kill -9`` does, or stops it there, as SIGSTOP does.

Put first on PYTHONPATH, it watches every JobManager that starts with it. A file in the directory that FAULT_POINTS
names is a point at which the next one to come there gets the signal that it holds; the file then ends in
``.reached``, and holds its process id.
Points are effects of the machine of a job (``DeployTasks``, ``PublishState.RUNNING``, ``ReportRival.WON``, what ``SendCommands`` sends: ``NotifyCompleted``), in front of
which it dies, calls to TaskManagers (``deploy_tasks``, ``start_rival``), behind whose answer it does, and what it stores of a job or of drains
(``note_end``), in front of which it dies at ``before_note_end``, and behind it at ``note_end``; and so with ``swap_head`` and
``delete_files``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

_PLACE = os.environ.get("FAULT_POINTS", "")
_CALLS = (
    *("allocate_slots", "deploy_tasks", "send_commands", "free_slots"),
    *("sweep_output", "release_partitions", "promote_partitions"),
)
_STORED = ("save", "reserve_attempts", "note_cancellation", "note_end", "note_clean")


def _die_at(names: list[str]) -> None:
    for name in names:
        point = Path(_PLACE, name)
        if point.exists():
            ending = signal.Signals[point.read_text()]
            point.write_text(str(os.getpid()))
            point.rename(f"{point}.reached")
            signal.pthread_kill(threading.get_ident(), ending)  # before its next step


def _names_of(effect: Any) -> list[str]:
    name = type(effect).__name__
    if name == "SendCommands":
        return [type(command).__name__ for command in effect.commands]
    detail = getattr(effect, {"PublishState": "state", "ReportRival": "fate"}.get(name, ""), None)
    return [name] if detail is None else [name, f"{name}.{detail.name}"]


def _watch() -> None:
    from jobmanager.checkpoint.checkpoint_deletions_runner import CheckpointDeletionsRunner
    from jobmanager.checkpoint.claimed_head_store import ClaimedHeadStore
    from jobmanager.job.job_master_runner import JobMasterRunner
    from jobmanager.job.rival_runner import RivalRunner
    from jobmanager.rpc.taskmanager_client import TaskManagerClient
    from jobmanager.stores.drains_store import DrainsStore
    from jobmanager.stores.job_store import JobStore

    perform = JobMasterRunner._perform

    def performed(runner: Any, effect: Any) -> None:
        _die_at(_names_of(effect))
        perform(runner, effect)

    def answered(owner: Any, name: str, point: str) -> None:
        call = getattr(owner, name)

        async def answered(*arguments: Any) -> Any:
            answer = await call(*arguments)
            _die_at([point])
            return answer

        setattr(owner, name, answered)

    def stored(store: Any, name: str, point: str) -> None:
        call = getattr(store, name)

        def stored(*arguments: Any) -> Any:
            _die_at([f"before_{point}"])
            answer = call(*arguments)
            _die_at([point])
            return answer

        setattr(store, name, stored)

    JobMasterRunner._perform = performed  # type: ignore[method-assign, assignment]
    for name in _CALLS:
        answered(TaskManagerClient, name, name)
    answered(RivalRunner, "_start", "start_rival")
    for name in _STORED:
        stored(JobStore, name, name)
    stored(DrainsStore, "write", "write_drains")
    stored(ClaimedHeadStore, "swap", "swap_head")
    stored(CheckpointDeletionsRunner, "delete", "delete_files")


if _PLACE and "jobmanager" in sys.orig_argv:
    _watch()
