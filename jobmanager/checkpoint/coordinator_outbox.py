"""What one step of the coordinator wants done, in order, answers to who has asked among it."""

from __future__ import annotations

from collections.abc import Iterable

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.trigger_policy import Request, Turn


class CoordinatorOutbox:
    """Collects it.

    Example: who is not there is not answered.
        >>> from jobmanager.checkpoint.trigger_policy import PERIODIC
        >>> outbox = CoordinatorOutbox()
        >>> outbox.answer(PERIODIC, 7)
        >>> outbox.refuse([Request("asked")], c.RequestRefused.NOT_RUNNING, "stopped")
        >>> [(each.request_id, each.detail) for each in outbox.take()]
        [('asked', 'stopped')]
        >>> outbox.take()
        []
    """

    def __init__(self) -> None:
        self._effects: list[c.CoordinatorEffect] = []

    def add(self, effect: c.CoordinatorEffect) -> None:
        """Behind all others."""
        self._effects.append(effect)

    def take(self) -> list[c.CoordinatorEffect]:
        """All of them, once."""
        effects, self._effects = self._effects, []
        return effects

    def answer(
        self,
        request: Request,
        checkpoint_id: int,
        refused: c.RequestRefused | None = None,
        detail: str = "",
    ) -> None:
        """Tells who has asked what has come of it; nobody has asked for periodic ones."""
        if request.turn is not Turn.PERIODIC:
            self.add(c.AnswerRequest(request.request_id, checkpoint_id, refused, detail))

    def refuse(
        self, requests: Iterable[Request], refused: c.RequestRefused, detail: str = ""
    ) -> None:
        """Tells who has asked that nothing begins for them."""
        for request in requests:
            self.answer(request, 0, refused, detail or refused.value)
