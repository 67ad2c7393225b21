"""Tells of directories that the thread of an event loop makes, lists or removes, and of files that it opens, links or
renames, but for what a process is made of and the note of a daemon that it runs.

Put first on PYTHONPATH, it watches every process that starts with it; each such call becomes a file, with its stack,
in the directory that EVENT_LOOP_WATCH names.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from typing import Any

_DIRECTORIES = frozenset({"os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"})
_FILES = frozenset({"open", "os.rename", "os.link"})
_MODULES = (".py", ".pyc", ".so")
_OWN = ("/dev/", "/proc/", "/logs/", "/run/")
_PLACE = os.environ.get("EVENT_LOOP_WATCH", "")
_NUMBERS = itertools.count()


def _is_watched(event: str, arguments: tuple[Any, ...]) -> bool:
    if event in _DIRECTORIES:
        return True
    path = str(arguments[0]) if event in _FILES else ""
    is_own = path.endswith(_MODULES) or any(part in path for part in _OWN)
    return bool(path) and not is_own and not path.startswith(_PLACE)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    running = getattr(sys.modules.get("asyncio.events"), "_get_running_loop", None)
    if running is None or not _is_watched(event, arguments) or running() is None:
        return
    told = f"{event} {arguments}\n{''.join(traceback.format_stack())}"
    with open(f"{_PLACE}/{os.getpid()}-{next(_NUMBERS)}", "w") as file:  # noqa: PTH123
        file.write(told)


if _PLACE:
    sys.addaudithook(_watch)
