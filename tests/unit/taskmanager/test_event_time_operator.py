"""``with_event_time`` in a chain: what it sends on, and when, as its origins come, fall silent and end."""

import dataclasses

import pyarrow as pa
import pytest

from common.elements import OriginEnded, StreamStatus, Watermark
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_to_bytes
from taskmanager.alignment.origins import Origins
from taskmanager.operators.event_time import EventTimeOperator
from tests.support.operator_harness import OperatorHarness

SCHEMA = pa.schema([("ts", pa.int64())])
IDLE, ACTIVE = StreamStatus(active=False), StreamStatus(active=True)


class Timed:
    """The operator on an unbounded source."""

    def __init__(self, *origins, idle_timeout_ms=0):
        spec = graph_pb2.Operator(
            event_time=graph_pb2.EventTimeSpec(column="ts", idle_timeout_ms=idle_timeout_ms),
            input_schema=schema_to_bytes(SCHEMA),
            output_schema=schema_to_bytes(SCHEMA.append(pa.field(EVENT_TIME, pa.int64(), False))),
        )
        self.origins = Origins(bounded=False)
        for origin in origins:
            self.origins.start(origin)
        self.operator = EventTimeOperator(spec)
        self.harness = OperatorHarness(self.operator, now_ms=1_000)
        self.operator.open(dataclasses.replace(self.harness.context, origins=self.origins))

    def push(self, *times):
        self.harness.push(pa.RecordBatch.from_pydict({"ts": times}, schema=SCHEMA))

    def end(self, origin):
        self.origins.end(origin)
        self.harness._run(self.operator.on_origin_ended(OriginEnded(origin)))

    def said(self):
        """The watermarks and statuses since the last call."""
        found = [e for e in self.harness.controls if not isinstance(e, OriginEnded)]
        self.harness.emitted.clear()
        return found


def test_without_an_origin_it_says_once_that_it_is_idle():
    timed = Timed()
    timed.harness.idle()
    timed.harness.idle()
    assert timed.said() == [IDLE]


def test_the_watermark_of_the_rows_that_end_an_idle_time_is_not_lost():
    timed = Timed()
    timed.harness.idle()
    timed.origins.start("a")
    timed.push(10, 20)
    assert timed.said() == [IDLE, ACTIVE, Watermark(19)]


def test_the_last_rows_of_a_split_count_when_it_ends():
    timed = Timed("a")
    timed.push(10)
    assert timed.said() == [Watermark(9)]
    timed.push(20)  # within the interval between two watermarks of a busy source
    assert timed.said() == []
    timed.end("a")
    assert timed.said() == [Watermark(19), IDLE]


def test_origins_that_are_all_silent_hold_nothing_back():
    timed = Timed("a", "b", idle_timeout_ms=100)
    timed.origins.current = "a"
    timed.push(50)
    assert timed.said() == []
    timed.harness.advance_clock(1_500)
    assert timed.said() == [Watermark(49), IDLE]


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_wall_clock_that_is_set_makes_no_origin_idle_earlier_or_later(hours):
    timed = Timed("a", idle_timeout_ms=100)
    timed.harness.advance_clock(1_200)
    assert timed.said() == [IDLE]
    timed.push(50)
    timed.said()
    timed.harness.clock.wall_ahead_ms = hours * 3_600_000
    timed.push(60)
    timed.harness.advance_clock(1_280)
    assert timed.said() == [Watermark(59)]
    timed.harness.advance_clock(1_400)
    assert timed.said() == [IDLE]


def test_after_a_restore_no_watermark_passes_what_is_still_unread():
    timed = Timed()
    timed.origins.bounded, timed.origins.all_known = True, True
    timed.origins.add("read on in the middle", 5)
    timed.origins.add("not opened before", 40)
    timed.harness.idle()
    timed.harness.snapshot()
    assert not any(isinstance(said, Watermark) for said in timed.said())
    timed.origins.start("read on in the middle")
    timed.harness.idle()
    assert timed.said() == []
    timed.push(30, 60)
    timed.harness.idle()
    assert timed.said() == [Watermark(39)]
    timed.origins.start("not opened before")
    timed.push(41)
    timed.end("read on in the middle")
    assert timed.said() == [Watermark(40)]
    taken = timed.harness.snapshot()
    assert taken.lists == ()
