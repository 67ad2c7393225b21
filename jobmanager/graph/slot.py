"""Where subtasks run: one slot of a TaskManager."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of one TaskManager's incarnation."""

    slot_id: str
    taskmanager_id: str
    incarnation: str
