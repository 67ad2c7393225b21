"""Aim: what decides imports no clock, thread, socket or store, and nobody can forget to say so.

Method: names tell. A module is a shell when its name ends as one, or its folder is for nothing else;
every other module is pure, and the test reads its imports, also those inside functions. The few
exceptions are named with what they import and why; one that is not needed any more fails as well.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IMPURE = {
    "asyncio", "threading", "time", "random", "uuid", "socket", "grpc", "kazoo", "boto3", "rocksdict", "pyspark",
}  # fmt: skip
SHELLS = ("runner", "store", "servicer", "client", "process", "main")
"""Last word of a shell's name: it acts, and holds a pure module that decides."""

FOLDERS_OF_SHELLS = {
    "penstock/cli": "a process of the user's",
    "penstock/client": "calls of the user's process",
    "penstock/storage/s3": "requests to a server",
    "penstock/local": "starts processes",
    "taskmanager/connectors": "files and sockets",
    "taskmanager/processes": "forks, control lines and what hangs on them",
}
EXCEPTIONS = {
    "penstock/storage/file_locks.py": ({"time"}, "waits for a lock of another process"),
    "penstock/functions/user_code.py": ({"threading"}, "cloudpickle has one list per process"),
    "penstock/storage/plain_codecs.py": ({"threading"}, "each thread has packers of its own"),
    "penstock/storage/request_counts.py": ({"threading"}, "any thread counts"),
    "penstock/storage/swap_counts.py": ({"threading"}, "any thread counts"),
    "penstock/storage/fsck.py": ({"time"}, "a command: the age of files"),
    "penstock/streams/environment.py": ({"uuid"}, "names a submission"),
    "jobmanager/dispatcher/known_jobs.py": ({"asyncio"}, "wakes up who tries again"),
    "jobmanager/job/job_operation.py": ({"asyncio"}, "wakes up who waits for its end"),
    "jobmanager/job/job_record.py": ({"asyncio"}, "wakes up who waits for a change"),
    "taskmanager/daemon/identity.py": ({"socket"}, "the name of the machine"),
    "taskmanager/kernels/fair_lock.py": ({"threading"}, "is a lock"),
    "taskmanager/state/memory.py": ({"threading"}, "exporting threads count apart"),
    "taskmanager/task/state_opening.py": ({"threading"}, "backends are opened on I/O threads"),
}


def modules() -> list[str]:
    """Paths of the product's modules, but for what is generated or shared by both daemons."""
    return sorted(
        str(path.relative_to(ROOT))
        for top in ("penstock", "jobmanager", "taskmanager")
        for path in (ROOT / top).rglob("*.py")
        if "_pb2" not in path.name
    )


def is_shell(module: str) -> bool:
    """Whether the names say that the module acts."""
    last = Path(module).stem.strip("_").split("_")[-1]
    return last in SHELLS or any(module.startswith(f"{folder}/") for folder in FOLDERS_OF_SHELLS)


def impure_imports(text: str) -> set[str]:
    """Which of ``IMPURE`` a module imports, anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
    return {name.partition(".")[0] for name in found} & IMPURE


@pytest.mark.parametrize("top", ["penstock", "jobmanager", "taskmanager"])
def test_what_is_no_shell_by_its_name_is_pure(top: str) -> None:
    impure = {
        module: sorted(found)
        for module in modules()
        if module.startswith(f"{top}/") and not is_shell(module)
        if (found := impure_imports((ROOT / module).read_text()) - _allowed(module))
    }
    assert not impure, (
        f"{impure}: a module that decides gets the time, ids and answers from outside; one that acts "
        f"ends in one of {SHELLS}"
    )


def test_exceptions_are_needed() -> None:
    for module, (allowed, _) in EXCEPTIONS.items():
        assert not is_shell(module), module
        assert impure_imports((ROOT / module).read_text()) == allowed, module
    for folder in FOLDERS_OF_SHELLS:
        own = [module for module in modules() if module.startswith(f"{folder}/")]
        assert any(impure_imports((ROOT / module).read_text()) for module in own), folder


@pytest.mark.parametrize(
    "module",
    [
        "jobmanager/job/failover.py",
        "jobmanager/job/speculation.py",
        "jobmanager/partitions/partition_tracker.py",
        "jobmanager/scheduler/slow_task_detector.py",
        "taskmanager/network/credit.py",
        "penstock/storage/manifest.py",
    ],
)
def test_cores_count_as_pure(module: str) -> None:
    assert module in modules()
    assert not is_shell(module)


def test_an_import_is_found_wherever_it_is() -> None:
    text = "import os, time\ndef f():\n    from grpc.aio import server\nfrom . import random\n"
    assert impure_imports(text) == {"time", "grpc"}


def _allowed(module: str) -> set[str]:
    return EXCEPTIONS.get(module, (set(), ""))[0]
