"""Watermarks per origin against the definition, over random histories."""

from hypothesis import given
from hypothesis import strategies as st

from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from taskmanager.alignment.origins import Origins
from taskmanager.alignment.watermark_generator import WatermarkGenerator

ORIGINS = ["a", "b", "c"]


def known(*names, bounded=True):
    origins = Origins(bounded=bounded)
    for name in names:
        origins.add(name, None)
    origins.all_known = True
    return origins


def test_an_unread_split_holds_the_watermark_back():
    origins = known("a", "b")
    generator = WatermarkGenerator(origins, 0, 0)
    origins.start("a")
    generator.rows_seen(1000, 0)
    assert not generator.advance(0)
    origins.end("a")
    generator.origin_ended("a", 0)
    origins.start("b")
    generator.rows_seen(10, 0)
    assert generator.advance(0)
    assert generator.watermark_ms == 9


def test_statistics_let_it_advance_up_to_the_smallest_unread_time():
    origins = Origins()
    origins.add("a", 0)
    origins.add("b", 500)
    origins.all_known = True
    generator = WatermarkGenerator(origins, 0, 0)
    origins.start("a")
    generator.rows_seen(1000, 0)
    assert generator.advance(0)
    assert generator.watermark_ms == 499


def test_a_bounded_source_waits_until_all_its_splits_are_known():
    origins = Origins()
    origins.add("a", 0)
    origins.start("a")
    generator = WatermarkGenerator(origins, 0, 0)
    generator.rows_seen(1000, 0)
    assert not generator.advance(0)
    origins.all_known = True
    assert generator.advance(0)


def test_a_silent_origin_becomes_idle_and_active_again():
    origins = known("a", "b", bounded=False)
    origins.start("b")
    origins.start("a")
    generator = WatermarkGenerator(origins, 0, 100)
    origins.current = "a"
    generator.rows_seen(1000, 0)
    origins.current = "b"
    generator.rows_seen(10, 0)
    assert generator.advance(0)
    assert generator.watermark_ms == 9
    origins.current = "a"
    generator.rows_seen(2000, 90)
    assert generator.advance(120)  # b has been silent for 120 ms
    assert generator.watermark_ms == 1999
    assert not generator.is_idle
    assert not generator.advance(500)
    assert generator.is_idle
    generator.rows_seen(3000, 600)
    assert generator.advance(600)
    assert not generator.is_idle


def test_when_all_origins_are_silent_none_holds_another_back():
    origins = known("a", "b", bounded=False)
    origins.start("b")
    origins.start("a")
    generator = WatermarkGenerator(origins, 0, 100)
    generator.rows_seen(1000, 0)
    generator.watch_from("b", 50)
    assert not generator.advance(140)  # a is idle, b not yet
    assert generator.advance(150)
    assert generator.watermark_ms == 999
    assert generator.is_idle


def test_what_a_split_has_said_last_counts_when_it_ends():
    origins = known("a", bounded=False)
    generator = WatermarkGenerator(origins, 100, 0)
    origins.start("a")
    generator.rows_seen(1000, 0)
    assert generator.advance(0)
    generator.rows_seen(3000, 0)
    origins.end("a")
    generator.origin_ended("a", 0)
    assert generator.watermark_ms == 2899
    generator.advance(0)
    assert generator.is_idle


def test_a_slow_reader_makes_no_origin_idle():
    origins = known("a", bounded=False)
    origins.has_waiting = lambda origin: True
    origins.start("a")
    generator = WatermarkGenerator(origins, 0, 100)
    generator.rows_seen(1000, 0)
    generator.advance(10_000)
    assert not generator.is_idle
    origins.has_waiting = lambda origin: False
    generator.advance(10_000)
    assert generator.is_idle


def test_an_unbounded_source_without_a_split_is_idle():
    generator = WatermarkGenerator(Origins(bounded=False), 0, 0)
    generator.advance(0)
    assert generator.is_idle


steps = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from(ORIGINS)),
        st.tuples(st.just("end"), st.sampled_from(ORIGINS)),
        st.tuples(st.just("rows"), st.sampled_from(ORIGINS), st.integers(-1000, 1000)),
    ),
    max_size=40,
)


@given(steps, st.integers(0, 100))
def test_the_watermark_follows_the_definition(history, out_of_orderness_ms):
    origins = known(*ORIGINS)
    generator = WatermarkGenerator(origins, out_of_orderness_ms, 0)
    largest, last = {}, MIN_TIMESTAMP_MS
    for step in history:
        name = step[1]
        if step[0] == "start" and name in origins.unread:
            origins.start(name)
        elif step[0] == "end" and name in origins.open:
            origins.end(name)
            generator.origin_ended(name, 0)
            said = [largest.get(n, MIN_TIMESTAMP_MS) for n in {name, *origins.open}]
            largest.pop(name, None)
            at_end = min(said) - out_of_orderness_ms - 1
            assert generator.watermark_ms == (last if origins.unread else max(last, at_end))
            last = generator.watermark_ms
        elif step[0] == "rows" and name in origins.open:
            origins.current = name
            generator.rows_seen(step[2], 0)
            largest[name] = max(step[2], largest.get(name, MIN_TIMESTAMP_MS))
        generator.advance(0)
        assert last <= generator.watermark_ms < MAX_TIMESTAMP_MS
        if generator.watermark_ms > last:
            assert not origins.unread
            assert generator.watermark_ms == min(
                largest[name] - out_of_orderness_ms - 1 for name in origins.open
            )
        last = generator.watermark_ms


def test_rows_that_come_in_any_order_say_nothing() -> None:
    origins = known("a", "b")
    generator = WatermarkGenerator(origins, 0, 1, in_any_order=True)
    origins.start("a")
    generator.rows_seen(1000, 0)
    assert not generator.advance(10_000)
    assert not generator.is_idle, "a reader that is slow will have rows"
    origins.end("a")
    generator.origin_ended("a", 0)
    assert not generator.advance(0)
    origins.start("b")
    origins.end("b")
    assert not generator.advance(0), "the end of the data says the rest"


def test_in_any_order_what_is_known_of_the_rows_to_come_counts() -> None:
    origins = Origins()
    origins.add("a", 0)
    origins.add("b", 500)
    origins.all_known = True
    generator = WatermarkGenerator(origins, 0, 0, in_any_order=True)
    origins.start("a")
    assert generator.advance(0)
    assert generator.watermark_ms == -1
    origins.rest_is_from("a", 700)
    assert generator.advance(0)
    assert generator.watermark_ms == 499
    origins.end("a")
    origins.start("b")
    assert not generator.advance(0)
    origins.rest_is_from("b", None)
    origins.rest_is_from("b", 600)
    assert generator.advance(0)
    assert generator.watermark_ms == 599
