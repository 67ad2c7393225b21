"""What another user of the machine can do: tried by processes of ``nobody``, which only root can start."""

from __future__ import annotations

import os
import stat
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.processes import Ended, Site

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

_READING = """
    import os, sys
    for directory in sys.argv[1:]:
        for where, directories, files in os.walk(directory, onerror=lambda error: None):
            for name in [*files, *directories]:
                path = os.path.join(where, name)
                if os.access(path, os.R_OK) and os.path.basename(path) not in ("penstock.yaml",):
                    print("can read", path)
"""

_CONNECTING = """
    import os, socket, sys
    for path in sys.argv[1:]:
        with socket.socket(socket.AF_UNIX) as peer:
            try:
                peer.connect(path)
                print("connected to", path)
            except PermissionError:
                print("refused")
"""


def as_nobody(place: Site, text: str, *arguments: str) -> Ended:
    program = place.start(
        "setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups",
        sys.executable, "-c", textwrap.dedent(text), *arguments,
        directory=Path(__file__).parents[2],
    )  # fmt: skip
    return program.wait()


def open_for_others(directory: Path) -> None:
    """Lets others look into a directory, and into those above it."""
    for one in (directory, *directory.parents):
        if one.stat().st_uid == os.getuid() and one != Path("/"):
            one.chmod(one.stat().st_mode | 0o055)


def readable_by_nobody(place: Site, *directories: Path) -> list[str]:
    """What he can read below some directories; private ones that their parent lists are left out."""
    read = as_nobody(place, _READING, *map(str, directories))
    assert read.status == 0, read.stderr
    return [line for line in read.stdout.splitlines() if not _is_closed(line)]


def connected_by_nobody(place: Site, paths: list[Path]) -> list[str]:
    """What becomes of it when he connects to Unix sockets."""
    connected = as_nobody(place, _CONNECTING, *map(str, paths))
    assert connected.status == 0, connected.stderr
    return connected.stdout.splitlines()


def _is_closed(line: str) -> bool:
    path = Path(line.removeprefix("can read "))
    return path.is_dir() and not stat.S_IMODE(path.stat().st_mode) & 0o077
