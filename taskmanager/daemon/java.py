"""Which Java Spark would be started with here."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_RELEASED = re.compile(r'^JAVA_VERSION="([^"]+)"', re.MULTILINE)
_TOLD = re.compile(r'version "([^"]+)"')
_TIMEOUT_S = 10.0


def installed_java(environment: Mapping[str, str]) -> str:
    """The version of the Java that Spark takes: of JAVA_HOME, else of the path; "" = there is none.

    It stands in a file beside the program, so that none has to be started; where there is no such file, the
    program is asked.
    """
    home = environment.get("JAVA_HOME", "")
    program = Path(home) / "bin" / "java" if home else None
    if program is None:
        found = shutil.which("java", path=environment.get("PATH"))
        if found is None:
            return ""
        program = Path(found)
    program = program.resolve()
    try:
        released = _RELEASED.search((program.parents[1] / "release").read_text(errors="replace"))
    except OSError:
        released = None
    return released.group(1) if released is not None else _asked(program)


def _asked(program: Path) -> str:
    try:
        answer = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    told = _TOLD.search(answer.stderr + answer.stdout)
    return "" if told is None else told.group(1)
