"""Runs an operator over a stream while checkpoints are taken, aborted, restored and rescaled.

The output of every element is compared with that of one operator that nothing happens to. Rows go to the
subtask that owns their key, watermarks and the clock to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.storage.key_encoding import encode_keys
from penstock.storage.key_groups import owners
from penstock.storage.key_types import plain_array
from taskmanager.operators.operator import Operator
from tests.support.operator_harness import HarnessSnapshot, OperatorHarness

Element = Any
"""A batch, or a time: of a watermark, or of the clock in processing time."""


@dataclass(frozen=True)
class Event:
    """What happens behind an element.

    Attributes:
        kind: "take" a checkpoint; "slow": take one that is exported behind the next element; "abort" one; "crash": go on from the newest complete one, as often as
            the stream has been there once; "rescale": take one and go on from it.
        parallelism: after a crash or a rescale.
    """

    kind: str
    parallelism: int = 1


class RestoringDriver:
    """The subtasks of one operator.

    Args:
        make: makes a new operator.
        keys: the key columns; none = parallelism 1 only.
        is_processing_time: integers of the stream are times of the clock.
        show: what is compared of a row.
        options: for the harnesses.
    """

    def __init__(
        self,
        make: Callable[[], Operator],
        keys: Sequence[str],
        *,
        is_processing_time: bool = False,
        show: Callable[[dict[str, Any]], str] = repr,
        **options: Any,
    ) -> None:
        self._make = make
        self._keys = tuple(keys)
        self._is_processing_time = is_processing_time
        self._options = options
        self._show = show
        self._now_ms = 0
        self._start((), 1)

    def _start(self, restored: Sequence[HarnessSnapshot], parallelism: int) -> None:
        self._harnesses = [
            OperatorHarness(
                self._make(),
                now_ms=self._now_ms,
                restored=restored,
                subtask_index=index,
                parallelism=parallelism,
                **self._options,
            )
            for index in range(parallelism)
        ]

    def run(self, stream: Sequence[Element], events: dict[int, list[Event]]) -> list[list[str]]:
        """The output of every element, sorted; the last one is that of the end.

        Args:
            stream: the elements.
            events: by index of the element they happen behind.
        """
        outputs: list[list[str]] = []
        slow: list[Callable[[bool], HarnessSnapshot]] = []
        complete: tuple[int, list[HarnessSnapshot], int] | None = None
        slow_now_ms = 0
        happened: set[tuple[int, int]] = set()
        index = 0
        while index < len(stream):
            output = self._feed(stream[index])
            if index < len(outputs):
                assert output == outputs[index], f"element {index} differs after a crash"
            else:
                outputs.append(output)
            if slow:
                complete = index, [finish(True) for finish in slow], slow_now_ms
                slow = []
            index += 1
            for which, event in enumerate(events.get(index - 1, [])):
                if event.kind == "crash":
                    if (index, which) in happened:
                        continue
                    happened.add((index, which))
                    slow = []
                    if complete is None:
                        index, self._now_ms = 0, 0
                        self._start((), self._parallelism(event))
                    else:
                        index, taken, self._now_ms = complete
                        self._start(taken, self._parallelism(event))
                    break
                if slow:
                    break
                if event.kind == "slow":
                    slow, slow_now_ms = [h.begin_snapshot() for h in self._harnesses], self._now_ms
                    continue
                taken = [h.snapshot(complete=event.kind != "abort") for h in self._harnesses]
                if event.kind != "abort":
                    complete = index, taken, self._now_ms
                if event.kind == "rescale":
                    self._start(taken, self._parallelism(event))
        for harness in self._harnesses:
            harness.end()
        outputs.append(self._take())
        return outputs

    def _parallelism(self, event: Event) -> int:
        return event.parallelism if self._keys else 1

    def _feed(self, element: Element) -> list[str]:
        if isinstance(element, pa.RecordBatch):
            for harness, part in zip(self._harnesses, self._parts(element), strict=True):
                harness.push(part)
        elif self._is_processing_time:
            self._now_ms = element
            for harness in self._harnesses:
                harness.advance_clock(element)
        else:
            for harness in self._harnesses:
                harness.watermark(element)
        return self._take()

    def _parts(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        count = len(self._harnesses)
        if count == 1:
            return [batch]
        keys = encode_keys([plain_array(batch.column(name)) for name in self._keys])
        owner = owners(keys.hashes, count, 128)
        return [batch.filter(pa.array(np.equal(owner, index))) for index in range(count)]

    def _take(self) -> list[str]:
        rows = []
        for harness in self._harnesses:
            rows += [f"late {row}" for row in harness.side("late")]
            rows += [self._show(row) for row in harness.take_rows(event_time=True)]
        return sorted(rows)


def uninterrupted(
    make: Callable[[], Operator], stream: Sequence[Element], **options: Any
) -> list[list[str]]:
    """What the stream comes to when nothing happens."""
    return RestoringDriver(make, (), **options).run(stream, {})
