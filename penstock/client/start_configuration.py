"""What a job starts from, as configuration: commands and calls say the same with the same keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from penstock.errors import ConfigurationError, JobRejected
from penstock.storage.store_names import whole_name

_PREFIX: Final = "execution.state-recovery."
_ABOUT_A_PATH: Final = {
    f"{_PREFIX}claim-mode": "no-claim",
    f"{_PREFIX}in-doubt": "",
    f"{_PREFIX}ignore-unclaimed-state": "false",
}
"""Key -> the value that says nothing."""


def start_configuration(
    path: str | os.PathLike[str] | None,
    *,
    claim: bool = False,
    in_doubt: str | None = None,
    ignores_unclaimed: bool = False,
) -> dict[str, str]:
    """The keys that are set.

    Args:
        path: of a savepoint, a job's checkpoints or one of them; None = as configured. A relative one is meant
            from here.
        claim: it belongs to the job from then on.
        in_doubt: "commit" | "leave"; None = as configured.
        ignores_unclaimed: state of operators that are gone is left out.

    Raises:
        JobRejected: the path is empty.
    """
    found: dict[str, str] = {}
    if path is not None:
        text = os.fspath(path)
        if not text:
            raise JobRejected("the path of a savepoint or checkpoint to start from is empty")
        found[f"{_PREFIX}path"] = whole_name(text)
    if claim:
        found[f"{_PREFIX}claim-mode"] = "claim"
    if in_doubt is not None:
        found[f"{_PREFIX}in-doubt"] = in_doubt
    if ignores_unclaimed:
        found[f"{_PREFIX}ignore-unclaimed-state"] = "true"
    return found


def check_start(said: Mapping[str, object], path: str) -> None:
    """Who says how a job is to start from something must say from what: it would begin from nothing instead.

    Args:
        said: what was set for this job, by key.
        path: what it starts from.

    Raises:
        ConfigurationError: something was said of a start from nothing.
    """
    idle = [
        f"{key}={value}"
        for key, value in said.items()
        if str(value).lower() != _ABOUT_A_PATH.get(key, str(value).lower())
    ]
    if idle and not path:
        raise ConfigurationError(
            f"{', '.join(idle)} is about what a job starts from, and this one starts from nothing: name that with "
            "--from-savepoint PATH, from_savepoint= or execution.state-recovery.path"
        )
