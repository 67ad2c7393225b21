"""Names that mean something else here than elsewhere."""

from __future__ import annotations

from math import floor as lower
from typing import Any

import pyarrow as pa

import penstock as ps

n = 3


def round(value: Any) -> int:
    """Not the built-in one."""
    return 7


@ps.compiled
class Renamed(ps.KeyedProcessFunction):
    """Names that mean something else here than elsewhere."""

    seen = ps.ValueState("seen", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        n = row.a
        total = 0
        for i in range(n):
            total += i
        self.seen.update(self.seen.value() + 1)
        len = total
        out.emit(user=row.user, n=len + lower(row.x))


class Rounded(ps.KeyedProcessFunction):
    """Calls what the module calls ``round``."""

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        out.emit(user=row.user, n=round(row.x))


Rounded = ps.compiled(Rounded)  # type: ignore[misc]
