"""Names that mean something else here than elsewhere."""

from __future__ import annotations

from math import floor as lower
from typing import Any

import penstock as ps

n = 3


def round(value: Any) -> int:
    """Not the built-in one."""
    return 7


@ps.compiled
class Renamed(ps.KeyedProcessFunction):
    """Names that mean something else here than elsewhere."""

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        n = row.a
        total = 0
        for i in range(n):
            total += i
        out.emit(user=row.user, n=total + lower(row.x))


class Rounded(ps.KeyedProcessFunction):
    """Calls what the module calls ``round``."""

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        out.emit(user=row.user, n=round(row.x))


Rounded = ps.compiled(Rounded)  # type: ignore[misc]
