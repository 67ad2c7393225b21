"""A checkpoint store on disk that is as bad as the test says, under real daemons.

The daemons are the real ones, with ``LocalStore`` replaced before they begin: ``python -P -m tests.support.bad_store
ROLE ARGUMENTS`` is such a daemon, ``python -P -m tests.support.bad_store penstock ARGUMENTS`` the command line that
starts such ones. A test changes what the store is like by writing a file, which each call reads; what was done to
calls is written beside it. What each call draws depends on its process: a seed repeats the plan of a test only.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import override

from penstock.errors import StoreTransient
from penstock.storage import open_store
from penstock.storage.local_store import LocalStore
from penstock.storage.object_store import ObjectInfo
from tests.support.simulated_store import CALM, StoreWeather

DIRECTORY_VARIABLE = "PENSTOCK_TEST_BAD_STORE"
_ROLES = ("jobmanager", "taskmanager")


class StoreControl:
    """The directory by which a test steers the stores of all processes.

    Args:
        directory: which is there.
    """

    def __init__(self, directory: Path) -> None:
        self._weather = directory / "weather.json"
        self._told = directory / "told"

    def set(self, weather: StoreWeather) -> None:
        """From now on calls are treated like that; none ever reads half of it."""
        new = self._weather.with_suffix(".new")
        new.write_text(json.dumps(asdict(weather)))
        new.replace(self._weather)

    def weather(self) -> StoreWeather:
        """How calls are treated now."""
        if not self._weather.exists():
            return CALM
        return StoreWeather(**json.loads(self._weather.read_text()))

    def tell(self, what: str, call: str) -> None:
        """Notes what was done to a call."""
        with self._told.open("a") as file:  # one short write at the end: whole among many writers
            file.write(f"{what} {call} {os.getpid()}\n")

    def told(self) -> Counter[str]:
        """How often was done what."""
        if not self._told.exists():
            return Counter()
        return Counter(line.split()[0] for line in self._told.read_text().splitlines())


class BadStore(LocalStore):
    """A ``LocalStore`` whose calls fail, hang, and lie about what they have done."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, **options)
        self._control = StoreControl(Path(os.environ[DIRECTORY_VARIABLE]))
        self._draws = random.Random(f"{os.getpid()} {root}")

    def _enter(self, call: str) -> StoreWeather:
        """What is done to a call before it does anything."""
        weather = self._control.weather()
        self._hang(weather, call)
        if self._draws.random() < weather.failures:
            self._control.tell("failed", call)
            raise StoreTransient(f"{call}: the bad store does not answer")
        return weather

    def _hang(self, weather: StoreWeather, call: str) -> None:
        # Before the call or behind it: a deadline tells nobody which.
        if self._draws.random() < weather.hanging / 2:
            self._control.tell("hung", call)
            threading.Event().wait(self._draws.randrange(weather.hanging_max_ms) / 1000)

    def _leave(self, weather: StoreWeather, call: str) -> bool:
        """What is done to a call that has done its work; whether its answer is to be the wrong one.

        Raises:
            StoreTransient: which it is told not to have done.
        """
        self._hang(weather, call)
        if self._draws.random() >= weather.lost_answers:
            return False
        if call.startswith("swap") and self._draws.random() < 0.5:
            self._control.tell("denied", call)
            return True
        self._control.tell("lost", call)
        raise StoreTransient(f"{call}: the answer of the bad store is lost")

    @override
    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        weather = self._enter(f"put {path}")
        size_bytes = super().put(path, chunks)
        self._leave(weather, f"put {path}")
        return size_bytes

    @override
    def get(self, path: str) -> bytes:
        self._enter(f"get {path}")
        return super().get(path)

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        self._enter(f"read {path}")
        return super().read(path, offset, size_bytes)

    @override
    def sizes(self, paths: Iterable[str]) -> Mapping[str, int]:
        wanted = list(paths)
        self._enter(f"sizes {len(wanted)}")
        return super().sizes(wanted)

    @override
    def list(self, prefix: str) -> list[ObjectInfo]:
        self._enter(f"list {prefix}")
        return super().list(prefix)

    @override
    def delete(self, path: str) -> None:
        weather = self._enter(f"delete {path}")
        super().delete(path)
        self._leave(weather, f"delete {path}")

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        weather = self._enter(f"swap {path}")
        swapped = super().compare_and_swap(path, expected, new)
        # As a store answers that was asked again by its own client: it is not ``expected`` any more.
        return swapped and not self._leave(weather, f"swap {path}")


def run_slot(connection: socket.socket) -> None:
    """A slot process on the bad store."""
    import taskmanager.task.slot_process as slot

    open_store.LocalStore = BadStore  # type: ignore[misc]
    slot.run(connection)


def _jobmanager(arguments: list[str]) -> int:
    import jobmanager.main

    open_store.LocalStore = BadStore  # type: ignore[misc]
    return jobmanager.main.main(arguments)


def _taskmanager(arguments: list[str]) -> int:
    import taskmanager.main

    return taskmanager.main.main(arguments, ("--entry", f"{_MODULE}:run_slot"))


def _penstock(arguments: list[str]) -> int:
    """The command line, whose daemons are those of this module."""
    from penstock.cli.main import main
    from penstock.local import local_cluster

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            if command[3] in _ROLES:
                command = [*command[:3], _MODULE, *command[3:]]
            super().__init__(command, **options)

    local_cluster.subprocess.Popen = Popen  # type: ignore[attr-defined,misc]
    main(arguments, prog_name="penstock")
    return 0


_MODULE = "tests.support.bad_store"
_MAINS = {"jobmanager": _jobmanager, "taskmanager": _taskmanager, "penstock": _penstock}

if __name__ == "__main__":
    sys.exit(_MAINS[sys.argv[1]](sys.argv[2:]))
