"""Functions that are compiled and, at the same time, run as they are written."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa

import penstock as ps

LIMIT = 10
FACTOR = 0.5


@ps.compiled
class Integers(ps.KeyedProcessFunction):
    """Every operation with two integers, by number."""

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        a = row.a
        b = row.b
        op = row.op
        value = 0
        if op == 0:
            value = a + b
        elif op == 1:
            value = a - b
        elif op == 2:
            value = a * b
        elif op == 3:
            value = a // b
        elif op == 4:
            value = a % b
        elif op == 5:
            value = a << b
        elif op == 6:
            value = a >> b
        elif op == 7:
            value = a & b
        elif op == 8:
            value = a | b
        elif op == 9:
            value = a ^ b
        elif op == 10:
            value = -a
        elif op == 11:
            value = abs(a)
        elif op == 12:
            value = ~a
        elif op == 13:
            value = min(a, b, 3)
        elif op == 14:
            value = max(a, b, -3)
        elif op == 15:
            value = a**3
        elif op == 16:
            value = +a
        elif op == 17:
            value = 1 if a < b <= 7 else 0
        elif op == 18:
            value = 1 if a >= b or a == 5 else 0
        elif op == 19:
            value = 1 if (a > b and a != 3) and not b else 0
        elif op == 20:
            value = a or b
        elif op == 21:
            value = a and b
        elif op == 22:
            value = 1 if a is None or b is None else 2
        elif op == 23:
            value = int(bool(a)) + round(b)
        elif op == 24:
            value = 1 if a == b else 0
        elif op == 26:
            for up in range(a, b):
                value = up
                if up > a + 2:
                    break
        elif op == 27:
            for down in range(a, b, -2):
                value = down
                if down < a - 4:
                    break
        out.emit(op=op, i=value, f=a / b if op == 25 else 0.0)


@ps.compiled
class Floats(ps.KeyedProcessFunction):
    """Every operation with two floats, and those of an integer and a float, by number."""

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        x = row.x
        y = row.y
        a = row.a
        op = row.op
        value = 0.0
        whole = 0
        if op == 0:
            value = x + y
        elif op == 1:
            value = x - y
        elif op == 2:
            value = x * y
        elif op == 3:
            value = x / y
        elif op == 4:
            value = x // y
        elif op == 5:
            value = x % y
        elif op == 6:
            value = -x
        elif op == 7:
            value = abs(x)
        elif op == 8:
            value = min(x, y)
        elif op == 9:
            value = max(x, y, 1.5)
        elif op == 10:
            value = x**4
        elif op == 11:
            whole = int(x)
        elif op == 12:
            whole = round(x)
        elif op == 13:
            whole = math.floor(x)
        elif op == 14:
            whole = math.ceil(x)
        elif op == 15:
            value = math.sqrt(x)
        elif op == 16:
            value = math.log(x)
        elif op == 17:
            value = math.exp(x)
        elif op == 18:
            whole = 1 if math.isnan(x) else (2 if math.isinf(x) else 3)
        elif op == 19:
            whole = 1 if x < y else (2 if x == y else (3 if x > y else 4))
        elif op == 20:
            whole = 1 if a < x else (2 if a == x else (3 if a > x else 4))
        elif op == 21:
            whole = 1 if x <= a else (2 if x != a else 3)
        elif op == 22:
            value = a + x
        elif op == 23:
            value = a * x
        elif op == 24:
            value = float(a)
        elif op == 25:
            value = math.fabs(x) + FACTOR
        elif op == 26:
            value = math.log10(x)
        elif op == 27:
            whole = math.trunc(x)
        elif op == 28:
            value = a // x
        elif op == 29:
            value = x % a
        elif op == 30:
            whole = 1 if x >= a else 2
        out.emit(op=op, i=whole, f=value)


@ps.compiled
class Everything(ps.KeyedProcessFunction):
    """States of each kind, loops, returns, errors of its own, rows for nothing and for many."""

    count = ps.ValueState("count", pa.int64(), default=0)
    small = ps.ValueState("small", pa.int8())
    best = ps.ValueState("best", pa.float64())
    seen = ps.ValueState("seen", pa.bool_())
    lived = ps.ValueState("lived", pa.int64(), ttl=ps.Ttl("1h"))

    def __init__(self, step: int = 2) -> None:
        self.step = step

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        """What the tests look at."""
        count = self.count.value() + 1
        self.count.update(count)
        self.lived.update((self.lived.value() or 0) + 1)
        if row["a"] is None:
            self.small.clear()
            self.seen.update(None)
            return
        a = row.a
        small: int = (self.small.value() or 0) + a
        self.small.update(small)
        best = self.best.value()
        if best is None or (row.x is not None and row.x > best):
            self.best.update(row.x)
        self.seen.update(a > LIMIT)
        if a == 13:
            out.emit(user=ctx.key, n=-1, small=small, best=None, seen=None)
            raise ValueError("thirteen")
        n = 0
        for i in range(0, a, self.step):
            if i == 6:
                continue
            j = 0
            while True:
                j += 1
                if j > 2:
                    break
                if i + j == 9:
                    out.emit(user=row.user, n=9, small=None, best=row.x, seen=False)
                    return
            n += j
            if n > 30:
                break
        if count % 2 == 0 and self.seen.value():
            pass
        else:
            out.emit(
                {
                    "user": row.user,
                    "n": n,
                    "small": small,
                    "best": self.best.value(),
                    "seen": self.seen.value(),
                }
            )


@ps.compiled
class Timed(ps.KeyedProcessFunction):
    """Timers from compiled code, fired in Python over the same state."""

    last = ps.ValueState("last", pa.int64())
    total = ps.ValueState("total", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        last = self.last.value()
        if last is not None and last != ctx.timestamp + 10:
            ctx.timers.delete_event_time(last)
        self.last.update(ctx.timestamp + 10)
        self.total.update(self.total.value() + row.a)
        ctx.timers.event_time(ctx.timestamp + 10)
        if ctx.watermark == ps.MAX_WATERMARK:
            out.emit(user=row.user, total=-1, at=0)

    def on_timer(self, timestamp: int, ctx: Any, out: ps.Collector) -> None:
        out.emit(user=ctx.key, total=self.total.value(), at=timestamp)
        self.total.clear()
        self.last.clear()


@ps.compiled(total=ps.ValueState("total", pa.int64(), default=0))
def totals(row: Any, state: Any, out: ps.Collector) -> None:
    """A plain function."""
    state.total.update(state.total.value() + row.a)
    out.emit(user=row.user, total=state.total.value())


@ps.compiled
class Asking(ps.KeyedProcessFunction):
    """Asks for event time."""

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        ctx.timers.event_time(row.a)

    def on_timer(self, timestamp: int, ctx: Any, out: ps.Collector) -> None:
        pass


@ps.compiled
class Unanswered(ps.KeyedProcessFunction):
    """Asks for a timer, and has nothing that is called at it."""

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        ctx.timers.processing_time(row.a)


@ps.compiled
class TakingBack(ps.KeyedProcessFunction):
    """Takes timers back that a former version of it has asked for."""

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        ctx.timers.delete_event_time(row.a)
        out.emit(user=row.user)


@ps.compiled
class KeyAndColumn(ps.KeyedProcessFunction):
    """Emits the key of a row, and the column it is made of."""

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        out.emit(key=ctx.key, column=row.key, is_there=ctx.key is not None)


@ps.compiled
class PassedOn(ps.KeyedProcessFunction):
    """Passes a column on beside a number."""

    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        out.emit(at=row.at, n=row.n)
