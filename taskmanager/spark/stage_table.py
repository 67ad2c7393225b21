"""The stages that a slot has under way in its Spark driver: what becomes of them as things happen.

Pure: it is told what happened and the time, and says what is to be done. A stage is cancelled gently first; what has not
ended a moment later is ended with the driver, and so are all others in it, which fail and come again.

    asked for -> begun -> ended (done, failed)
        \\______\\___-> cancelled, or overdue -> ended
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from taskmanager.spark.stage_messages import RunStage, StageBegun, StageDone, StageFailed

CANCEL_GRACE_S = 2.5
"""How long Spark has to stop a stage that it was told to."""


@dataclass(frozen=True, slots=True)
class StageEnd:
    """How a stage has ended; without a message it is done.

    Attributes:
        user_traceback: of the user's code, or what is the user's to change; "" where a restart may mend it.
    """

    message: str = ""
    user_traceback: str = ""

    @property
    def is_done(self) -> bool:
        """Whether its output is complete."""
        return not self.message


OnEnd = Callable[[StageEnd], None]


@dataclass(frozen=True, slots=True)
class TellEnd:
    """Tells who asked for a stage how it has ended."""

    on_end: OnEnd
    end: StageEnd


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Has Spark stop a stage."""

    stage_id: str


@dataclass(frozen=True, slots=True)
class EndDriver:
    """Kills the driver."""

    reason: str


Effect = TellEnd | Interrupt | EndDriver


@dataclass(slots=True)
class _Stage:
    stage: RunStage
    on_end: OnEnd
    timeout_s: float
    deadline_s: float
    is_begun: bool = False
    end: StageEnd | None = None
    """What it comes to when it has been stopped; None = it goes on."""


class StageTable:
    """The stages under way.

    Args:
        start_timeout_s: how long the session may take.

    Example: Spark is told to stop a stage first; a driver that does not manage is killed.
        >>> import pyarrow as pa
        >>> stage = RunStage("s", "best", "f", "function", (), pa.schema([]), "out", "log")
        >>> table = StageTable(start_timeout_s=120)
        >>> table.asked(stage, 0, print, now_s=0)
        >>> table.cancelled("s", now_s=10)
        [Interrupt(stage_id='s')]
        >>> table.next_deadline_s
        12.5
        >>> [type(effect).__name__ for effect in table.passed(now_s=12.5)]
        ['EndDriver']
    """

    def __init__(self, start_timeout_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._stages: dict[str, _Stage] = {}

    def __len__(self) -> int:
        return len(self._stages)

    def asked(self, stage: RunStage, timeout_s: float, on_end: OnEnd, now_s: float) -> None:
        """A stage has been handed to the driver.

        Args:
            timeout_s: from its beginning on; 0 = as long as it likes.
        """
        deadline_s = now_s + self._start_timeout_s
        self._stages[stage.stage_id] = _Stage(stage, on_end, timeout_s, deadline_s)

    def begun(self, message: StageBegun, now_s: float) -> None:
        """Its session is there."""
        stage = self._stages.get(message.stage_id)
        if stage is not None and stage.end is None:
            stage.is_begun = True
            stage.deadline_s = now_s + stage.timeout_s if stage.timeout_s else float("inf")

    def ended(self, message: StageDone | StageFailed) -> list[Effect]:
        """The driver has answered."""
        stage = self._stages.pop(message.stage_id, None)
        effects: list[Effect] = []
        if stage is not None:
            end = stage.end
            if end is None and isinstance(message, StageFailed):
                end = StageEnd(message.message, message.user_traceback)
            effects.append(TellEnd(stage.on_end, end or StageEnd()))
        if isinstance(message, StageFailed) and message.ends_driver:
            effects.append(EndDriver("its session has ended"))
        return effects

    def cancelled(self, stage_id: str, now_s: float) -> list[Effect]:
        """Nobody wants a stage any more."""
        stage = self._stages.get(stage_id)
        if stage is None or stage.end is not None:
            return []
        return self._stop(stage, StageEnd("it was cancelled"), now_s)

    def _stop(self, stage: _Stage, end: StageEnd, now_s: float) -> list[Effect]:
        stage.end = end
        stage.deadline_s = now_s + CANCEL_GRACE_S
        return [Interrupt(stage.stage.stage_id)]

    @property
    def next_deadline_s(self) -> float | None:
        """When ``passed`` has something to do."""
        due_s = min((stage.deadline_s for stage in self._stages.values()), default=float("inf"))
        return None if due_s == float("inf") else due_s

    def passed(self, now_s: float) -> list[Effect]:
        """Time has passed."""
        effects: list[Effect] = []
        for stage in [one for one in self._stages.values() if one.deadline_s <= now_s]:
            where = f"operator {stage.stage.operator!r}"
            if stage.end is not None:
                effects.append(
                    EndDriver(f"the stage of {where} did not stop when Spark was told to stop it")
                )
            elif stage.is_begun:
                message = f"{where}: {stage.stage.function_name} took longer than its timeout of {stage.timeout_s:g} s"
                effects += self._stop(stage, StageEnd(message, message), now_s)
            else:
                effects.append(
                    EndDriver(
                        f"Spark had no session after {self._start_timeout_s:g} s (execution.spark.start-timeout); where "
                        "spark.master or spark.remote name a server: is it up, and can this TaskManager reach it?"
                    )
                )
        return effects

    def driver_ended(self, reason: str) -> list[TellEnd]:
        """The driver has ended, whatever it was doing."""
        stages: Iterable[_Stage] = self._stages.values()
        self._stages = {}
        return [
            TellEnd(
                stage.on_end,
                stage.end
                or StageEnd(
                    f"operator {stage.stage.operator!r}: the Spark driver, which ran {stage.stage.function_name}, has "
                    f"ended: {reason}"
                ),
            )
            for stage in stages
        ]
