"""How checkpoints of one job are taken, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigurationError

UNLIMITED = -1
"""``tolerable_failed``: checkpoints may fail for ever without failing the job."""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Settings of the coordinator.

    Attributes:
        interval_ms: time between the starts of two checkpoints; None = on demand only.
        timeout_ms: a checkpoint that is not complete by then is aborted, or settled where it is being stored.
        min_pause_ms: time between the end of a checkpoint and the start of the next periodic one.
        max_concurrent: checkpoints under way at once, the one being stored included.
        tolerable_failed: checkpoints that may fail in a row; -1 = any number.
        retained_max: completed checkpoints to keep.
        is_incremental: checkpoints may refer to files of earlier ones.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    interval_ms: int | None
    timeout_ms: int = 600_000
    min_pause_ms: int = 0
    max_concurrent: int = 1
    tolerable_failed: int = UNLIMITED
    retained_max: int = 1
    is_incremental: bool = True

    def __post_init__(self) -> None:
        if self.interval_ms is not None:
            _at_least("interval", self.interval_ms, 1)
        _at_least("timeout", self.timeout_ms, 1)
        _at_least("min-pause", self.min_pause_ms, 0)
        _at_least("max-concurrent-checkpoints", self.max_concurrent, 1)
        _at_least("tolerable-failed-checkpoints", self.tolerable_failed, UNLIMITED)
        _at_least("num-retained", self.retained_max, 1)


def _at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ConfigurationError(
            f"execution.checkpointing.{name} is {value}: it must be at least {minimum}"
        )
