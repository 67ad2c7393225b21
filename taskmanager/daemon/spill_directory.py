"""The directory for partitions that do not fit into memory, or outlive their slot: one per TaskManager.

It holds a lock that its daemon keeps, so that no two share one, and whatever a dead daemon left, also
one that was killed, is removed by the next that starts there.
"""

from __future__ import annotations

from pathlib import Path

from penstock.local.owned_directories import OwnedDirectory, sweep_owned_directories

_PREFIX = "spill-"


def own_spill_directory(
    configured: str, work_directory: Path, taskmanager_id: str
) -> tuple[OwnedDirectory, list[Path]]:
    """Makes the directory of this TaskManager, empty.

    Args:
        configured: ``taskmanager.spill.dir``, "" = below the work directory.
        work_directory: of this TaskManager.
        taskmanager_id: becomes part of the path.

    Returns:
        The directory, to be removed at the end, and what dead TaskManagers had left next to it.

    Raises:
        ConfigurationError: a living TaskManager has it, or it cannot be made.
    """
    if not configured:
        return OwnedDirectory.create(work_directory / "spill"), []
    parent = Path(configured).absolute()
    swept = sweep_owned_directories(parent, _PREFIX)
    return OwnedDirectory.create(parent / f"{_PREFIX}{taskmanager_id}"), swept
