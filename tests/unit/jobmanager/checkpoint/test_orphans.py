"""What is swept behind a restart, while attempts run and finish."""

from __future__ import annotations

from jobmanager.checkpoint.orphans import orphans


def test_what_finishing_subtasks_leave_is_not_swept_beside_them() -> None:
    """It is written for no checkpoint, and perhaps after what is kept was read."""
    left, ended, later = (f"shared/{id}-v0-0-4-0123456789ab" for id in (0, 3, 9))
    present = [left, ended, later]
    assert orphans(present, (), ended_id=3, alone=None, first_attempt=4) == [ended]
    assert orphans(present, (), ended_id=3, alone=None, first_attempt=5) == [left, ended]
    assert orphans(present, (), ended_id=3, alone=(), first_attempt=5) == []
