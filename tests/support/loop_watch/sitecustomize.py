"""Tells of directories that the thread of an event loop makes, lists or removes.

Put first on PYTHONPATH, it watches every process that starts with it; each such call becomes a file, with its stack,
in the directory that EVENT_LOOP_WATCH names.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from typing import Any

_WATCHED = frozenset({"os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"})
_PLACE = os.environ.get("EVENT_LOOP_WATCH", "")
_NUMBERS = itertools.count()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _WATCHED or (asyncio := sys.modules.get("asyncio.events")) is None:
        return
    if asyncio._get_running_loop() is None:
        return
    told = f"{event} {arguments}\n{''.join(traceback.format_stack())}"
    with open(f"{_PLACE}/{os.getpid()}-{next(_NUMBERS)}", "w") as file:  # noqa: PTH123
        file.write(told)


if _PLACE:
    sys.addaudithook(_watch)
