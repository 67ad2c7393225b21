"""The slot pool: decisions by hand, invariants under any interleaving."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobmanager.graph.slot import Slot
from jobmanager.scheduler import slots as s
from tests.support.examples import examples


def pool_of(**slots: int) -> s.SlotPool:
    pool = s.SlotPool()
    for taskmanager_id, count in slots.items():
        assert pool.step(s.TaskManagerAdded(taskmanager_id, "1", count)) == []
    return pool


def granted(effects: list[s.SlotEffect]) -> tuple[Slot, ...]:
    (grant,) = effects
    assert isinstance(grant, s.GrantSlots)
    return grant.slots


def test_slots_are_spread_over_the_least_loaded() -> None:
    pool = pool_of(a=4, b=2)
    slots = granted(pool.step(s.SlotsRequested("j", 3, 100)))
    assert [slot.slot_id for slot in slots] == ["a-0", "b-0", "a-1"]
    assert (pool.total, pool.free, pool.counts("a"), pool.counts("?")) == (6, 3, (4, 2), (0, 0))
    assert pool.holds("j", "a", "a-1")
    assert not pool.holds("j", "a", "a-3")


def test_requests_are_served_in_order_and_a_large_one_is_not_overtaken() -> None:
    pool = pool_of(a=2)
    first = granted(pool.step(s.SlotsRequested("first", 1, 100)))
    assert pool.step(s.SlotsRequested("large", 2, 100)) == []
    assert pool.step(s.SlotsRequested("small", 1, 100)) == []
    assert pool.waiting_jobs == ("large", "small")
    assert granted(pool.step(s.SlotsFreed("first", first)))
    assert pool.step(s.TimePassed(99)) == []
    assert pool.step(s.TimePassed(100)) == [s.RefuseRequest("small", 1, 2, 0, 1)]


def test_a_taskmanager_that_is_drained_offers_nothing_and_counts_for_nothing() -> None:
    pool = pool_of(a=2, b=2)
    mine = granted(pool.step(s.SlotsRequested("j", 2, 100)))
    assert pool.step(s.TaskManagerOffers("a", is_drained=True)) == []
    pool.check()
    assert (pool.total, pool.free, pool.counts("a")) == (2, 1, (2, 1))
    assert [slot.taskmanager_id for slot in granted(pool.step(s.SlotsRequested("k", 1, 9)))] == [
        "b"
    ]
    assert pool.take_spare("k", ()) is None
    assert pool.step(s.SlotsRequested("l", 1, 9)) == []
    assert (
        pool.step(s.SlotsFreed("j", tuple(one for one in mine if one.taskmanager_id == "a"))) == []
    )
    pool.check()
    [again] = granted(pool.step(s.TaskManagerOffers("a", is_drained=False)))
    assert again.taskmanager_id == "a"
    pool.check()
    # Who comes while it is drained is told of it at once, before it is given anything.
    assert pool.step(s.SlotsRequested("m", 2, 9)) == []
    assert pool.step(s.TaskManagerAdded("a", "2", 2, (), is_drained=True)) == []
    pool.check()
    [refusal] = pool.step(s.TimePassed(9))
    assert refusal == s.RefuseRequest("m", 2, 2, 0, 1, drained=1)
    assert pool.step(s.TaskManagerRemoved("a")) == []
    pool.check()


def test_who_waits_behind_a_refused_request_is_served() -> None:
    pool = pool_of(a=2)
    assert granted(pool.step(s.SlotsRequested("first", 1, 100)))
    assert pool.step(s.SlotsRequested("large", 2, 50)) == []
    assert pool.step(s.SlotsRequested("small", 1, 100)) == []
    refusal, grant = pool.step(s.TimePassed(50))
    assert refusal == s.RefuseRequest("large", 2, 2, 1, 1)
    assert isinstance(grant, s.GrantSlots)


def test_a_request_that_the_cluster_is_too_small_for_holds_nobody_up() -> None:
    pool = pool_of(a=2)
    assert pool.step(s.SlotsRequested("huge", 3, 50)) == []
    assert granted(pool.step(s.SlotsRequested("small", 1, 100)))
    assert pool.step(s.SlotsRequested("large", 2, 100)) == []
    pool.check()
    # A TaskManager more, and it is first in line again.
    assert granted(pool.step(s.TaskManagerAdded("b", "1", 2)))[0].taskmanager_id == "b"
    assert [len(pool.open_requests(job)) for job in ("huge", "large")] == [0, 1]
    pool.check()
    # Without it, the next in line may be too large as well.
    pool.step(s.TaskManagerRemoved("b"))
    assert pool.step(s.SlotsRequested("huge again", 3, 50)) == []
    assert pool.step(s.TimePassed(50)) == [s.RefuseRequest("huge again", 3, 2, 0, 1)]


def test_a_new_incarnation_loses_the_slots_of_the_old() -> None:
    pool = pool_of(a=1)
    old = granted(pool.step(s.SlotsRequested("j", 1, 100)))
    assert pool.step(s.TaskManagerAdded("a", "1", 1)) == []
    assert pool.free == 0
    assert pool.step(s.TaskManagerAdded("a", "2", 1)) == []
    assert (pool.free, pool.held_by("j")) == (1, ())
    assert pool.step(s.SlotsFreed("j", old)) == []
    assert (pool.free, pool.dropped_events) == (1, 1)


def test_a_spare_slot_is_given_at_once_or_not_at_all() -> None:
    pool = pool_of(a=1, b=2)
    assert pool.take_spare("j", {"a", "b"}) is None
    spare = pool.take_spare("j", {"b"})
    assert spare is not None
    assert (spare.slot_id, pool.held_by("j")) == ("a-0", (spare,))
    assert pool.take_spare("j", {"b"}) is None
    assert pool.step(s.SlotsRequested("waits", 3, 100)) == []
    assert pool.take_spare("j", ()) is None, "two are free, and somebody waits for them"
    pool.check()
    assert granted(pool.step(s.SlotsFreed("j", (spare,))))


def test_what_had_best_be_somewhere_is_there_where_that_has_room_now() -> None:
    pool = pool_of(a=2, b=2)
    [two] = pool.step(s.SlotsRequested("j", 3, 100, near=("b", "gone", "b")))
    assert [slot.taskmanager_id for slot in two.slots] == ["b", "b", "a"]
    [one] = pool.step(s.SlotsRequested("k", 1, 100, near=("b",)))
    assert [slot.taskmanager_id for slot in one.slots] == ["a"], "nobody waits for the place"
    drained = pool_of(a=1, b=1)
    drained.step(s.TaskManagerOffers("b", is_drained=True))
    [one] = drained.step(s.SlotsRequested("j", 1, 100, near=("b",)))
    assert [slot.taskmanager_id for slot in one.slots] == ["a"]


EVENTS = st.one_of(
    st.builds(s.TaskManagerAdded, st.sampled_from("ab"), st.sampled_from("12"), st.integers(1, 3)),
    st.builds(s.TaskManagerRemoved, st.sampled_from("ab")),
    st.tuples(
        st.just("request"),
        st.sampled_from("xyz"),
        st.integers(0, 2),
        st.integers(1, 4),
        st.lists(st.sampled_from("abc"), max_size=4),
    ),
    st.tuples(st.just("free"), st.sampled_from("xyz")),
    st.tuples(st.just("spare"), st.sampled_from("xyz"), st.sets(st.sampled_from("ab"))),
    st.builds(s.RequestWithdrawn, st.sampled_from("xyz"), st.integers(0, 2)),
    st.builds(s.TaskManagerOffers, st.sampled_from("ab"), st.booleans()),
    st.builds(s.TimePassed, st.integers(0, 20)),
)


@examples(200)
@given(st.lists(EVENTS, max_size=40))
def test_any_interleaving_keeps_the_books(events: list[object]) -> None:
    """Every request has one answer at most; the held slots are what a dumb ledger says."""
    pool = s.SlotPool()
    ledger: dict[str, list[Slot]] = {}
    open_requests: dict[tuple[str, int], int] = {}
    incarnations: dict[str, str] = {}
    drained: set[str] = set()
    for event in events:
        match event:
            case ("request", str(job), int(group), int(count), list(near)):
                if (job, group) in open_requests or len(ledger.get(job, ())) > 2:
                    continue
                open_requests[job, group] = count
                effects = pool.step(s.SlotsRequested(job, count, 10, group, tuple(near[:count])))
            case ("spare", str(job), set(avoided)):
                effects = []
                there = any(pool.counts(name)[1] for name in {"a", "b"} - avoided - drained)
                spare = pool.take_spare(job, avoided)
                assert (spare is not None) == (there and not open_requests)
                if spare is not None:
                    assert spare.taskmanager_id not in avoided
                    ledger.setdefault(job, []).append(spare)
            case ("free", str(job)):
                effects = pool.step(s.SlotsFreed(job, tuple(ledger.pop(job, []))))
            case s.RequestWithdrawn(job, group):
                open_requests.pop((job, group), None)
                effects = pool.step(event)
            case s.TaskManagerAdded(taskmanager_id, incarnation):
                if incarnations.get(taskmanager_id) != incarnation:
                    drained.discard(taskmanager_id)
                    for held in ledger.values():
                        held[:] = [h for h in held if h.taskmanager_id != taskmanager_id]
                incarnations[taskmanager_id] = incarnation
                effects = pool.step(event)
            case s.TaskManagerRemoved(taskmanager_id):
                incarnations.pop(taskmanager_id, None)
                for held in ledger.values():
                    held[:] = [h for h in held if h.taskmanager_id != taskmanager_id]
                effects = pool.step(event)
            case s.TaskManagerOffers(taskmanager_id, is_drained):
                if taskmanager_id in incarnations:
                    drained.discard(taskmanager_id)
                    drained |= {taskmanager_id} if is_drained else set()
                effects = pool.step(event)
            case s.TimePassed():
                effects = pool.step(event)
            case _:
                raise AssertionError(event)
        for effect in effects:
            count = open_requests.pop((effect.job_id, effect.group))
            if isinstance(effect, s.GrantSlots):
                assert len(effect.slots) == count
                assert drained.isdisjoint(slot.taskmanager_id for slot in effect.slots)
                ledger.setdefault(effect.job_id, []).extend(effect.slots)
            else:
                assert effect.needed == count
        pool.check()
        for job in "xyz":
            assert sorted(pool.held_by(job), key=str) == sorted(ledger.get(job, []), key=str)
        waiting = [(r.job_id, r.group) for job in "xyz" for r in pool.open_requests(job)]
        assert sorted(waiting) == sorted(open_requests)
        assert pool.next_deadline_ms() == (10 if open_requests else None)
