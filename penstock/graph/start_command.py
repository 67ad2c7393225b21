"""What a person types to start a job again from a checkpoint or a savepoint."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def start_command(
    name: str,
    path: str,
    run_options: Sequence[str],
    run_arguments: Sequence[str],
    *,
    in_doubt: str = "",
    ignores_unclaimed: bool = False,
) -> str:
    """The command; a call where no command has submitted the job.

    Args:
        path: what to start from.
        run_options: the script and its options, as ``penstock run`` takes them.
        run_arguments: of the script.
        in_doubt: what is to be said of the output that a savepoint covers; "" = nothing has to.
        ignores_unclaimed: state that the job has no operator for is left out.

    Example:
        >>> start_command("clicks", "/data/chk-3", ["job.py"], ["--day", "1"])
        'penstock run --from-savepoint /data/chk-3 job.py -- --day 1'
        >>> start_command("clicks", "/data/saved", ["job.py"], [], in_doubt="leave")
        'penstock run --from-savepoint /data/saved --in-doubt leave job.py'
        >>> start_command("clicks", "/data/chk-3", [], [])
        "env.submit('clicks', from_savepoint='/data/chk-3')"
        >>> start_command("clicks", "/data/saved", [], [], in_doubt="leave")
        "env.submit('clicks', from_savepoint='/data/saved') with execution.state-recovery.in-doubt: leave"
    """
    if not run_options:
        keys = {
            "in-doubt": in_doubt,
            "ignore-unclaimed-state": "true" if ignores_unclaimed else "",
        }
        said = [f"execution.state-recovery.{key}: {value}" for key, value in keys.items() if value]
        call = f"env.submit({name!r}, from_savepoint={path!r})"
        return f"{call} with {', '.join(said)}" if said else call
    options = ["--in-doubt", in_doubt] if in_doubt else []
    options += ["--allow-non-restored-state"] if ignores_unclaimed else []
    rest = ["--", *run_arguments] if run_arguments else []
    return shlex.join(["penstock", "run", "--from-savepoint", path, *options, *run_options, *rest])
