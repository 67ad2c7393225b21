"""How consumers ask for a result partition (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override


@dataclass(frozen=True, slots=True)
class PartitionId:
    """One execution attempt's output on one edge."""

    edge_id: str
    vertex: str
    subtask_index: int
    attempt: int

    @override
    def __str__(self) -> str:
        return f"{self.edge_id} of {self.vertex}/{self.subtask_index} (attempt {self.attempt})"
