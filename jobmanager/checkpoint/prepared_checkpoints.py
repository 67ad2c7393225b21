"""What the checkpoints of a job say about its start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from common.done_splits import DoneSplits
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.repeated_output import RepeatedOutput
from penstock.pb import checkpoint_pb2


@dataclass(frozen=True, slots=True)
class PreparedCheckpoints:
    """What a job starts from.

    Attributes:
        newest: manifest of the newest checkpoint that can be read; None = there is none.
        retained: what HEAD names and can be read, oldest first.
        goes_back: newer checkpoints are damaged.
        repeated: what is written again for that; None = nothing.
        is_of_another: ``newest`` was taken of another job: this one has no checkpoint of its own yet.
        open_savepoints: ids of those that were taken behind ``newest``, and whose output no checkpoint commits.
        done: what the newest says that sources have read to its end, by operator uid.
        sweep: removes what dead attempts have left, beside what goes on from here; told what was written since
            for the start; None = nothing may be removed. Raises a ``StreamError`` where something stays.
    """

    newest: checkpoint_pb2.CheckpointManifest | None
    retained: tuple[CompletedCheckpoint, ...]
    next_checkpoint_id: int
    goes_back: bool = False
    repeated: RepeatedOutput | None = None
    is_of_another: bool = False
    open_savepoints: frozenset[int] = frozenset()
    done: Mapping[str, DoneSplits] = field(default_factory=dict)
    sweep: Callable[[Collection[str]], None] | None = None
