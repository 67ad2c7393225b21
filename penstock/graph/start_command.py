"""What a person types to start a job again from a checkpoint or a savepoint."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def start_command(
    name: str, path: str, run_options: Sequence[str], run_arguments: Sequence[str]
) -> str:
    """The command; a call where no command has submitted the job.

    Args:
        path: what to start from.
        run_options: the script and its options, as ``penstock run`` takes them.
        run_arguments: of the script.

    Example:
        >>> start_command("clicks", "/data/chk-3", ["job.py"], ["--day", "1"])
        'penstock run --from-savepoint /data/chk-3 job.py -- --day 1'
        >>> start_command("clicks", "/data/chk-3", [], [])
        "env.submit('clicks', from_savepoint='/data/chk-3')"
    """
    if not run_options:
        return f"env.submit({name!r}, from_savepoint={path!r})"
    rest = ["--", *run_arguments] if run_arguments else []
    return shlex.join(["penstock", "run", "--from-savepoint", path, *run_options, *rest])
