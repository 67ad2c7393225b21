"""A mapping that another thread gets at while it is iterated over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import override

_TURN_S = 0.05


class Interrupted(dict[Any, Any]):
    """In the midst of the first iteration a thread has its turn; where it has to wait for a lock, it goes on
    when that is free.

    Args:
        content: at the beginning.
        meanwhile: what the thread does.
    """

    def __init__(self, content: dict[Any, Any], meanwhile: Callable[[], object]) -> None:
        super().__init__(content)
        self.thread: threading.Thread | None = None
        self._meanwhile = meanwhile

    @override
    def __iter__(self) -> Iterator[Any]:
        return self._interrupted(super().__iter__())

    @override
    def items(self) -> Any:
        return self._interrupted(iter(super().items()))

    def _interrupted(self, content: Iterator[Any]) -> Iterator[Any]:
        for each in content:
            if self.thread is None:
                self.thread = threading.Thread(target=self._meanwhile)
                self.thread.start()
                self.thread.join(_TURN_S)
            yield each

    def end(self) -> None:
        """Returns when the thread has ended."""
        assert self.thread is not None, "nobody has iterated"
        self.thread.join()
