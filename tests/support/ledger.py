"""The ledger: a job in which every lost or repeated row shows, and what must come out of it.

Transfer ``i`` between two accounts is a pure function of ``i``, so the whole output is known without
running anything. The job books each transfer twice, as a debit and as a credit, with every kind of state in
the path: values, a map and a list per account, timers of both domains, broadcast state, operator list
state, a window. Its outputs are written by three committing file sinks, one per format.

What is checked in ``check_exactly_once`` and ``check_at_least_once`` uses no code of the engine.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import penstock as ps
from tests.support.committed_files import Table

ACCOUNTS = 200
FIRST_MS = 1_700_000_000_000
STEP_MS = 10
"""Event time between two transfers."""
STATEMENT_MS = 20_000
WINDOW_MS = 10_000
TICK_MS = 300
TICKING = 20
"""Every how many-th account has a timer of processing time."""
RATES = 50
RECENT = 3

TRANSFER = pa.schema([(name, pa.int64()) for name in ("id", "source", "target", "amount", "at_ms")])
RATE = pa.schema([(name, pa.int64()) for name in ("number", "rate", "at_ms")])
ENTRY = pa.schema([(name, pa.int64()) for name in ("id", "account", "other", "amount", "at_ms")])
BOOKING = pa.schema(
    [
        ("kind", pa.string()),
        *(
            (name, pa.int64())
            for name in (
                "account", "n", "id", "amount", "balance", "at_ms", "others", "recent", "rates", "rate_sum",
            )
        ),
    ]
)  # fmt: skip
NUMBERED = pa.schema([("id", pa.int64()), ("counter", pa.string()), ("n", pa.int64())])


# ---------------------------------------------------------------- the pure functions


def transfer_columns(start: int, count: int) -> dict[str, Any]:
    """Transfers ``start`` to ``start + count``: int64[count] each."""

    def mixed(salt: int) -> Any:
        word = ids.astype(np.uint64) + np.uint64(salt)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
        return word ^ (word >> np.uint64(31))

    ids = np.arange(start, start + count, dtype=np.int64)
    source = mixed(0x9E3779B97F4A7C15) % np.uint64(ACCOUNTS)
    step = np.uint64(1) + mixed(0x3C6EF372FE94F82A) % np.uint64(ACCOUNTS - 1)
    amount = np.uint64(1) + mixed(0xDAA66D2C7DDF743F) % np.uint64(1000)
    return {
        "id": ids,
        "source": source.astype(np.int64),
        "target": ((source + step) % np.uint64(ACCOUNTS)).astype(np.int64),
        "amount": amount.astype(np.int64),
        "at_ms": FIRST_MS + ids * STEP_MS,
    }


def make_transfers(start: int, count: int) -> pa.RecordBatch:
    """What the source of the job calls."""
    return pa.record_batch(transfer_columns(start, count), schema=TRANSFER)


def rate_of(number: int) -> int:
    """The rate with this number."""
    return number * number + 7


def two_entries(row: Any) -> Any:
    """The debit and the credit of a transfer."""
    yield {
        "id": row.id, "account": row.source, "other": row.target,
        "amount": -row.amount, "at_ms": row.at_ms,
    }  # fmt: skip
    yield {
        "id": row.id, "account": row.target, "other": row.source,
        "amount": row.amount, "at_ms": row.at_ms,
    }  # fmt: skip


# ---------------------------------------------------------------- the job


class Book(ps.KeyedBroadcastProcessFunction):
    """Books entries; numbers all that an account emits of each kind."""

    balance = ps.ValueState("balance", pa.int64(), default=0)
    counts = ps.MapState("counts", pa.string(), pa.int64())
    others = ps.MapState("others", pa.int64(), pa.int64())
    recent = ps.ListState("recent", pa.int64())
    rates = ps.BroadcastState("rates", pa.int64(), pa.int64())

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        balance = self.balance.value() + row.amount
        self.balance.update(balance)
        self.others.put(row.other, self.others.get(row.other, 0) + 1)
        self.recent.update([*self.recent.get(), row.id][-RECENT:])
        n = self._next("entry")
        if n == 1 and row.account % TICKING == 0:
            ctx.timers.processing_time(ctx.now_ms + TICK_MS)
        ctx.timers.event_time((row.at_ms // STATEMENT_MS + 1) * STATEMENT_MS)
        self._emit(out, "entry", row.account, n, row.id, row.amount, row.at_ms)

    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
        self.rates.put(row.number, row.rate)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        if ctx.time_domain == "processing":
            ctx.timers.processing_time(ctx.now_ms + TICK_MS)
            self._emit(out, "tick", ctx.key, self._next("tick"), 0, 0, 0)
        else:
            booked = self.counts.get("entry", 0)
            self._emit(out, "statement", ctx.key, self._next("statement"), booked, 0, timestamp)

    def _next(self, kind: str) -> int:
        n = self.counts.get(kind, 0) + 1
        self.counts.put(kind, n)
        return n

    def _emit(
        self, out: Any, kind: str, account: int, n: int, id: int, amount: int, at_ms: int
    ) -> None:
        out.emit(
            kind=kind, account=account, n=n, id=id, amount=amount, at_ms=at_ms,
            balance=self.balance.value(), others=len(self.others), recent=sum(self.recent.get()),
            rates=len(self.rates), rate_sum=sum(self.rates.values()),
        )  # fmt: skip


class Number(ps.ProcessFunction):
    """Numbers the rows of a subtask by a counter that lives in operator state."""

    counters = ps.OperatorListState("counters", ps.MSGPACK)

    def open(self, ctx: ps.FunctionContext) -> None:
        held = [(item["name"], item["n"]) for item in self.counters.get()]
        self.kept = held[1:]
        self.name, self.n = held[0] if held else (uuid.uuid4().hex, 0)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.n += 1
        out.emit(id=row.id, counter=self.name, n=self.n)

    def snapshot(self, ctx: ps.CheckpointContext) -> None:
        held = [(self.name, self.n), *self.kept]
        self.counters.update([{"name": name, "n": n} for name, n in held])


class UnevenTransfers(ps.Source):
    """Transfers ``first`` and on in two splits, one of which ends long before the other.

    So the job is checkpointed and restored with one subtask of this source finished and the other not.

    Args:
        rate: transfers per second of each split.
        gate: a file without which the last row of a split does not come; "" = it does.
    """

    schema = TRANSFER

    def __init__(self, first: int, sizes: tuple[int, int], rate: float, gate: str) -> None:
        self.first = first
        self.sizes = sizes
        self.rate = rate
        self.gate = gate
        self.now_ms: Any = None

    def start(self, ctx: Any) -> None:
        self.now_ms = ctx.now_ms

    def discover(self, ctx: Any) -> list[ps.Split]:
        starts = (self.first, self.first + self.sizes[0])
        return [
            ps.Split(f"{start}-{size}", size=size)
            for start, size in zip(starts, self.sizes, strict=True)
        ]

    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        start, size = map(int, split.id.split("-"))
        done = int(position or b"0")
        return PacedTransfers(start, size, done, self.rate, self.now_ms, self.gate)


class PacedTransfers(ps.Reader):
    """Reads one split of ``UnevenTransfers``."""

    def __init__(
        self, start: int, size: int, done: int, rate: float, now_ms: Any, gate: str
    ) -> None:
        self.start, self.size, self.done = start, size, done
        self.gate = gate
        self.per_ms = rate / 1000
        self.now_ms = now_ms
        self.began_ms = now_ms() - done / self.per_ms

    def read(self, max_rows: int) -> Any:
        if self.done == self.size:
            return ps.END
        due = int((self.now_ms() - self.began_ms) * self.per_ms)
        is_held = bool(self.gate) and not Path(self.gate).exists()
        count = min(max_rows, self.size - is_held - self.done, due - self.done)
        if count < 1:
            return None
        batch = make_transfers(self.start + self.done, count)
        self.done += count
        return batch

    def next_read_at_ms(self) -> int:
        return max(int(self.began_ms + (self.done + 1) / self.per_ms), self.now_ms()) + 5

    def position(self) -> bytes:
        return b"%d" % self.done


@dataclass(frozen=True)
class Ledger:
    """One ledger job.

    Attributes:
        even: transfers of the source that ends everywhere at once.
        rate: of these, per second.
        output: directory of its outputs.
        gate: file without which the job does not end; "" = it does.
    """

    even: int
    rate: float
    output: Path
    gate: str = ""

    @property
    def uneven(self) -> tuple[int, int]:
        """Transfers in each split of the other source: they end early, and past the middle."""
        return self.even // 80, self.even // 15

    @property
    def rows(self) -> int:
        """All transfers."""
        return self.even + sum(self.uneven)

    @property
    def bookings(self) -> str:
        return str(self.output / "bookings")

    @property
    def transfers(self) -> str:
        return str(self.output / "transfers")

    @property
    def totals(self) -> str:
        return str(self.output / "totals")

    def even_transfers(self, env: ps.Environment) -> ps.Stream:
        """The source that ends everywhere at once."""
        return (
            env.generate(make_transfers, rows=self.even, rate=self.rate, schema=TRANSFER)
            .uid("transfers")
            .with_event_time("at_ms")
            .uid("transfers-time")
        )

    def build(self, env: ps.Environment) -> None:
        """Adds the job to an environment."""
        step = self.even // RATES

        def make_rates(start: int, count: int) -> pa.RecordBatch:
            numbers = range(start, start + count)
            columns = {
                "number": list(numbers),
                "rate": [number * number + 7 for number in numbers],
                "at_ms": [FIRST_MS + number * step * STEP_MS for number in numbers],
            }
            return pa.record_batch(columns, schema=RATE)

        rates = (
            env.generate(make_rates, rows=RATES, rate=self.rate / step, schema=RATE)
            .uid("rates")
            .parallelism(1)
            .with_event_time("at_ms")
            .uid("rates-time")
        )
        even = self.even_transfers(env)
        uneven = (
            env.source(UnevenTransfers(self.even, self.uneven, self.rate / 10, self.gate))
            .uid("uneven-transfers")
            .with_event_time("at_ms")
            .uid("uneven-transfers-time")
        )
        transfers = even.union(uneven)
        entries = transfers.flat_map(two_entries, schema=ENTRY).uid("entries")
        booked = (
            entries.key_by("account").connect(rates.broadcast()).process(Book(), schema=BOOKING)
        )
        booked.uid("book").write_parquet(self.bookings).uid("bookings")
        numbered = transfers.rebalance().process(Number(), schema=NUMBERED).uid("number")
        numbered.write_json(self.transfers).uid("transfer-ids")
        window = ps.tumbling(f"{WINDOW_MS}ms")
        totals = transfers.key_by("target").window(window)
        totals.aggregate(rows=ps.count(), amount=ps.sum("amount")).uid("windows").write_csv(
            self.totals
        ).uid("totals")


# ---------------------------------------------------------------- what must come out


def check_exactly_once(ledger: Ledger, bookings: Table, numbered: Table, totals: Table) -> None:
    """Every row has had its effect exactly once in state and in all outputs."""
    expected = transfer_columns(0, ledger.rows)
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in bookings.rows():
        by_kind[row["kind"]].append(row)
    entries = _by_account(by_kind["entry"])
    _check_entries(expected, entries)
    _check_statements(expected, entries, _by_account(by_kind["statement"]))
    for account, ticks in _by_account(by_kind["tick"]).items():
        assert account % TICKING == 0
        assert [row["n"] for row in ticks] == list(range(1, len(ticks) + 1)), account
    _check_numbers(ledger.rows, numbered)
    _check_totals(expected, totals)


def check_at_least_once(ledger: Ledger, bookings: Table, numbered: Table, totals: Table) -> None:
    """Nothing is lost; what is there more than once is allowed."""
    expected = transfer_columns(0, ledger.rows)
    entries = [row for row in bookings.rows() if row["kind"] == "entry"]
    found = {(row["id"], row["account"], row["amount"]) for row in entries}
    _same("entries", found, set(_entries(expected)))
    _same("transfers", {row["id"] for row in numbered.rows()}, set(range(ledger.rows)))
    least = _expected_totals(expected)
    counted: dict[tuple[int, int], int] = {}
    for row in totals.rows():
        key = row["target"], row["window_start"]
        counted[key] = max(counted.get(key, 0), row["rows"])
    missing = [key for key, (rows, _) in least.items() if counted.get(key, 0) < rows]
    assert not missing, f"{len(missing)} windows lack rows, for example {missing[:3]}"


def _entries(expected: dict[str, Any]) -> list[tuple[int, int, int]]:
    ids, amounts = expected["id"].tolist(), expected["amount"].tolist()
    debits = zip(ids, expected["source"].tolist(), (-amount for amount in amounts), strict=True)
    return [*debits, *zip(ids, expected["target"].tolist(), amounts, strict=True)]


def _check_entries(expected: dict[str, Any], entries: dict[int, list[dict[str, Any]]]) -> None:
    found = Counter((r["id"], r["account"], r["amount"]) for rows in entries.values() for r in rows)
    _same("entries", found, Counter(_entries(expected)))
    accounts = np.zeros(ACCOUNTS, np.int64)
    np.add.at(accounts, expected["source"], -expected["amount"])
    np.add.at(accounts, expected["target"], expected["amount"])
    others = dict(zip(zip(expected["id"].tolist(), expected["source"].tolist(), strict=True),
                      expected["target"].tolist(), strict=True))  # fmt: skip
    others |= dict(zip(zip(expected["id"].tolist(), expected["target"].tolist(), strict=True),
                       expected["source"].tolist(), strict=True))  # fmt: skip
    for account, rows in entries.items():
        assert [row["n"] for row in rows] == list(range(1, len(rows) + 1)), f"account {account}"
        balance, met, recent, rates = 0, set(), [], 0
        for row in rows:
            balance += row["amount"]
            met.add(others[row["id"], account])
            recent = [*recent, row["id"]][-RECENT:]
            assert row["balance"] == balance, row
            assert row["others"] == len(met), row
            assert row["recent"] == sum(recent), row
            assert row["rates"] >= rates, row
            rates = row["rates"]
            assert row["rate_sum"] == sum(map(rate_of, range(rates))), row
        assert balance == accounts[account], f"account {account}"
    assert sum(rows[-1]["balance"] for rows in entries.values()) == 0


def _check_statements(
    expected: dict[str, Any],
    entries: dict[int, list[dict[str, Any]]],
    statements: dict[int, list[dict[str, Any]]],
) -> None:
    due = (expected["at_ms"] // STATEMENT_MS + 1) * STATEMENT_MS
    wanted = set(zip(expected["source"].tolist(), due.tolist(), strict=True))
    wanted |= set(zip(expected["target"].tolist(), due.tolist(), strict=True))
    found = Counter((a, row["at_ms"]) for a, rows in statements.items() for row in rows)
    _same("statements", found, Counter(wanted))
    for account, rows in statements.items():
        assert [row["n"] for row in rows] == list(range(1, len(rows) + 1)), account
        assert [row["at_ms"] for row in rows] == sorted(row["at_ms"] for row in rows), account
        times = [row["at_ms"] for row in entries[account]]
        for row in rows:
            booked = row["id"]
            assert booked >= sum(time < row["at_ms"] for time in times), row
            assert row["balance"] == entries[account][booked - 1]["balance"], row


def _check_numbers(rows: int, numbered: Table) -> None:
    found = numbered.rows()
    _same("transfers", Counter(row["id"] for row in found), Counter(range(rows)))
    counters = defaultdict(list)
    for row in found:
        counters[row["counter"]].append(row["n"])
    for name, numbers in counters.items():
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), f"counter {name}"


def _check_totals(expected: dict[str, Any], totals: Table) -> None:
    found = Counter(
        (row["target"], row["window_start"], row["rows"], row["amount"]) for row in totals.rows()
    )
    wanted = Counter((*key, *value) for key, value in _expected_totals(expected).items())
    _same("windows", found, wanted)


def _expected_totals(expected: dict[str, Any]) -> dict[tuple[int, int], tuple[int, int]]:
    """(account, start of the window in ms) -> (rows, amount)."""
    starts = expected["at_ms"] // WINDOW_MS * WINDOW_MS
    sums: dict[tuple[int, int], tuple[int, int]] = {}
    columns = (expected["target"], starts, expected["amount"])
    for account, start, amount in zip(*(column.tolist() for column in columns), strict=True):
        rows, total = sums.get((account, start), (0, 0))
        sums[account, start] = rows + 1, total + amount
    return sums


def _by_account(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """In order of their number."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["n"]):
        found[row["account"]].append(row)
    return found


def _same(what: str, found: Any, wanted: Any) -> None:
    """Equal sets, or equal multisets."""
    if found == wanted:
        return
    lost, extra = wanted - found, found - wanted
    raise AssertionError(
        f"{what}: {len(lost)} lost, for example {sorted(lost)[:3]}; {len(extra)} too many, "
        f"for example {sorted(extra)[:3]}"
    )
