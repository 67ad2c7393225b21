"""Kills a JobManager in the midst of something, as ``kill -9`` does.

Put first on PYTHONPATH, it watches every JobManager that starts with it. A file in the directory that FAULT_POINTS
names is a point at which the next one to come there dies; the file then ends in ``.reached``, and holds its process id.
Points are effects of the machine of a job (``DeployTasks``, ``PublishState.RUNNING``, what ``SendCommands`` sends: ``NotifyCompleted``), in front of
which it dies, and calls to TaskManagers (``deploy_tasks``), behind whose answer it does.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

_PLACE = os.environ.get("FAULT_POINTS", "")
_CALLS = ("allocate_slots", "deploy_tasks", "send_commands", "free_slots")


def _die_at(names: list[str]) -> None:
    for name in names:
        point = Path(_PLACE, name)
        if point.exists():
            point.write_text(str(os.getpid()))
            point.rename(f"{point}.reached")
            os.kill(os.getpid(), signal.SIGKILL)


def _names_of(effect: Any) -> list[str]:
    name = type(effect).__name__
    if name == "SendCommands":
        return [type(command).__name__ for command in effect.commands]
    return [name, f"{name}.{effect.state.name}"] if name == "PublishState" else [name]


def _watch() -> None:
    from jobmanager.job.job_master_runner import JobMasterRunner
    from jobmanager.rpc.taskmanager_client import TaskManagerClient

    perform = JobMasterRunner._perform

    def performed(runner: Any, effect: Any) -> None:
        _die_at(_names_of(effect))
        perform(runner, effect)

    def answered(name: str) -> Any:
        call = getattr(TaskManagerClient, name)

        async def answered(*arguments: Any) -> Any:
            answer = await call(*arguments)
            _die_at([name])
            return answer

        return answered

    JobMasterRunner._perform = performed  # type: ignore[method-assign, assignment]
    for name in _CALLS:
        setattr(TaskManagerClient, name, answered(name))


if _PLACE and "jobmanager" in sys.orig_argv:
    _watch()
