"""Files with secrets, read only where no other user can read them.

A container engine mounts its secrets for the container's users to read: below ``/run/secrets``, on a mount
of their own. Nobody but the administrator can mount anything there, so such a file may be readable by
others, unless others could change it.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from penstock.errors import ConfigurationError

_ENGINE_SECRETS: Final = Path("/run/secrets")
_MOUNTS: Final = Path("/proc/self/mountinfo")
_SIZE_MAX_BYTES: Final = 64 * 1024


def read_secret(path: Path, what: str) -> str:
    """The content of a file that this user alone can read.

    Args:
        what: what to call it in an error.

    Raises:
        ConfigurationError: it cannot be read, or others can read it too.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_SIZE_MAX_BYTES + 1)
        real = path.resolve()
    except OSError as error:
        raise ConfigurationError(f"{what} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode) or len(content) > _SIZE_MAX_BYTES:
        raise ConfigurationError(f"{what} is no file with one secret in it")
    try:
        _refuse_readable(real, status, what)
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what} cannot be read: {error}") from error


def _refuse_readable(real: Path, status: os.stat_result, what: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    is_own = status.st_uid in (os.geteuid(), 0)
    if (is_own and not mode & 0o077) or _is_engine_secret(real, status):
        return
    whose = f"mode {mode:04o}" if is_own else f"it belongs to user {status.st_uid}"
    raise ConfigurationError(
        f"{what} can be read by other users ({whose}), who could then run code as yours: give it to the user "
        f"that reads it, and `chmod 600 {real}`. Only what a container engine mounts below "
        f"{_ENGINE_SECRETS} may be readable by others"
    )


def _is_engine_secret(real: Path, status: os.stat_result) -> bool:
    if not real.is_relative_to(_ENGINE_SECRETS):
        return False
    point, is_read_only = mount_of(real, _MOUNTS.read_text(errors="surrogateescape"))
    is_roots_alone = status.st_uid == 0 and not status.st_mode & 0o022
    return point.is_relative_to(_ENGINE_SECRETS) and (is_read_only or is_roots_alone)


def mount_of(path: Path, mounts: str) -> tuple[Path, bool]:
    """The mount that a path lies on.

    Args:
        path: without links.
        mounts: as ``/proc/self/mountinfo`` lists them; later ones hide earlier ones.

    Returns:
        The mount point, and whether nothing can be written there.
    """
    found, is_read_only = Path("/"), False
    for line in mounts.splitlines():
        own, _, of_file_system = line.partition(" - ")
        point = Path(_unescaped(own.split()[4]))
        if not path.is_relative_to(point) or len(point.parts) < len(found.parts):
            continue
        options = {*own.split()[5].split(","), *of_file_system.split()[-1].split(",")}
        found, is_read_only = point, "ro" in options
    return found, is_read_only


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
