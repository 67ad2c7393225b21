"""Aim: every object store keeps the contract of ``ObjectStore``.

Method: one suite on all stores; random calls against a dict; several processes that swap one object.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.errors import StoreCorrupt, StoreFull, StoreNotFound, StoreTransient
from penstock.storage.local_store import LocalStore
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore, Range, delete_all, ranges_of
from tests.support.examples import examples

MakeStore = Callable[[], ObjectStore]


@pytest.fixture(params=["local", "memory"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    numbers = iter(range(10**6))
    if request.param == "local":
        return lambda: LocalStore(tmp_path / f"checkpoints-{next(numbers)}" / "job")
    return lambda: MemoryStore(1 << 20)


@pytest.fixture
def store(make_store: MakeStore) -> ObjectStore:
    return make_store()


def paths(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.path for info in store.list(prefix)]


def test_what_was_put_is_there(store: ObjectStore) -> None:
    assert store.put("chk-1/manifest", iter((b"ab", memoryview(b"cde"), b""))) == 5
    assert store.get("chk-1/manifest") == b"abcde"
    assert store.read("chk-1/manifest", 1, 3) == b"bcd"
    assert store.read("chk-1/manifest", 5, 0) == b""
    assert store.put("chk-1/manifest", [b"x"]) == 1
    assert store.get("chk-1/manifest") == b"x"
    (info,) = store.list("")
    assert (info.path, info.size_bytes) == ("chk-1/manifest", 1)
    assert info.modified_at_ms > 1_600_000_000_000


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    assert store.put("empty", ()) == 0
    assert store.get("empty") == b""
    assert paths(store) == ["empty"]


def test_words_count_as_their_bytes(store: ObjectStore) -> None:
    words = memoryview(bytes(range(16))).cast("I")
    assert store.put("words", [words]) == 16
    assert store.get("words") == bytes(range(16))


def test_what_is_not_there(store: ObjectStore) -> None:
    with pytest.raises(StoreNotFound, match="a/b"):
        store.get("a/b")
    with pytest.raises(StoreNotFound, match="a/b"):
        store.read("a/b", 0, 1)
    assert store.list("") == store.list("a/") == []
    store.delete("a/b")
    store.put("a/b", [b"1"])
    for path in ("a", "a/b/c"):  # neither above nor below an object
        with pytest.raises(StoreNotFound):
            store.get(path)
        with pytest.raises(StoreNotFound):
            store.read(path, 0, 1)
        store.delete(path)
    assert paths(store) == ["a/b"]


def test_a_range_beyond_the_end_is_damage(store: ObjectStore) -> None:
    store.put("f", [b"12345"])
    with pytest.raises(StoreCorrupt, match=r"f ends at 5 bytes: 3 bytes at offset 3"):
        store.read("f", 3, 3)
    with pytest.raises(StoreCorrupt):
        store.read("f", 99, 1)
    for offset, size in ((-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="no range"):
            store.read("f", offset, size)


def test_ranges_come_in_order_and_few_of_them_ahead(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.storage.object_store.RANGE_BYTES", 7)
    content = bytes(range(100))
    store.put("a", [content])
    store.put("b", [content[::-1]])
    for offset, size in ((0, 100), (3, 70), (99, 1), (50, 0)):
        parts = list(store.ranges(ranges_of("a", offset, size)))
        assert b"".join(parts) == content[offset : offset + size]
        assert all(len(part) <= 7 for part in parts)
    mixed = [("a", 10, 3), ("b", 0, 100), ("a", 0, 8), ("b", 99, 1)]  # larger ones, too
    found = [*store.ranges(mixed)]
    assert found == [content[10:13], content[::-1], content[:8], content[:1]]
    with pytest.raises(StoreCorrupt, match="a ends at 100"):
        list(store.ranges(ranges_of("a", 90, 11)))
    with pytest.raises(StoreNotFound):
        list(store.ranges([("a", 0, 1), ("c", 0, 1)]))
    asked: list[Range] = []
    begun = store.ranges(asked.append(one) or one for one in ranges_of("a", 0, 100))  # type: ignore[func-returns-value]
    assert next(begun) == content[:7]
    assert len(asked) <= 4
    begun.close()
    assert len(asked) <= 4


def test_listings_go_by_prefix(store: ObjectStore) -> None:
    names = ["HEAD", "chk-1/manifest", "chk-10/a/b", "chk-10/manifest", "shared/x", "shared/xy"]
    for name in reversed(names):
        store.put(name, [name.encode()])
    assert paths(store) == names
    assert paths(store, "chk-1") == names[1:4]
    assert paths(store, "chk-1/") == ["chk-1/manifest"]
    assert paths(store, "shared/x") == ["shared/x", "shared/xy"]
    assert paths(store, "shared/xy") == ["shared/xy"]
    assert paths(store, "z") == paths(store, "shared/xyz") == paths(store, "HEAD/") == []


def test_deleted_is_deleted(store: ObjectStore) -> None:
    for name in ("a/b/c", "a/d", "e"):
        store.put(name, [b"1"])
    store.delete("a/b/c")
    assert paths(store) == ["a/d", "e"]
    store.delete("a/d")
    store.delete("e")
    store.delete("e")
    assert paths(store) == []
    store.put("a/b/c", [b"2"])
    assert store.get("a/b/c") == b"2"


def test_many_are_deleted_at_once(store: ObjectStore) -> None:
    for name in ("HEAD", "a/b", "a/c", "d"):
        store.put(name, [b"1"])
    assert store.delete_many(iter(("a/b", "d", "gone", "d"))) == {}
    assert paths(store) == ["HEAD", "a/c"]
    assert store.delete_many(()) == {}
    delete_all(store, ["HEAD"])
    assert paths(store) == ["a/c"]


def test_what_cannot_be_deleted_is_named_and_holds_up_nothing(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        store.put(name, [b"1"])
    real = type(store).delete

    def delete(self: ObjectStore, path: str) -> None:
        if path == "a":
            raise StoreTransient("a is held")
        real(self, path)

    monkeypatch.setattr(type(store), "delete", delete)
    left = store.delete_many(["a", "b"])
    assert {path: str(error) for path, error in left.items()} == {"a": "a is held"}
    with pytest.raises(StoreTransient, match="a is held"):
        delete_all(store, ["a", "c"])
    assert paths(store) == ["a"]


def test_first_parts_are_named_once(store: ObjectStore) -> None:
    for name in ("shared/x", "shared/y/z", "HEAD", "chk-1/m"):
        store.put(name, [b"1"])
    assert store.first_parts() == ("HEAD", "chk-1", "shared")


def test_of_an_emptied_store_nothing_remains(store: ObjectStore) -> None:
    store.check_writable()
    store.put("a/b", [b"1"])
    store.remove_remains()
    assert paths(store) == ["a/b"]
    store.delete("a/b")
    store.remove_remains()
    store.remove_remains()
    assert paths(store) == []
    assert store.temporaries() == store.sweep_temporaries(0) == ()
    store.put("a/b", [b"2"])
    assert store.get("a/b") == b"2"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/passwd",
        "..",
        "../x",
        "a/../../x",
        "a//b",
        "a/",
        ".",
        "a/./b",
        ".x",
        "a/.tmp-1",
        "a\0",
        "x" * 250,
    ],
)
def test_no_path_leaves_the_store(store: ObjectStore, path: str) -> None:
    for call in (
        lambda: store.put(path, [b"1"]),
        lambda: store.get(path),
        lambda: store.read(path, 0, 1),
        lambda: store.delete(path),
        lambda: store.compare_and_swap(path, None, b"1"),
    ):
        with pytest.raises(ValueError, match="no object's path"):
            call()
    assert store.list("") == []


@pytest.mark.parametrize("prefix", ["..", "../", "a/../", "/", ".tmp-"])
def test_no_listing_leaves_the_store(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(ValueError, match="no object's path"):
        store.list(prefix)


def test_a_swap_needs_what_it_expects(store: ObjectStore) -> None:
    assert not store.compare_and_swap("HEAD", b"a", b"b")
    assert store.compare_and_swap("HEAD", None, b"a")
    assert not store.compare_and_swap("HEAD", None, b"b")
    assert not store.compare_and_swap("HEAD", b"", b"b")
    assert store.get("HEAD") == b"a"
    assert store.compare_and_swap("HEAD", b"a", b"b")
    assert store.get("HEAD") == b"b"
    assert paths(store) == ["HEAD"]
    store.delete("HEAD")
    assert not store.compare_and_swap("HEAD", b"b", b"c")
    assert store.compare_and_swap("HEAD", None, b"")
    assert store.compare_and_swap("HEAD", b"", b"c")


def test_a_failing_source_leaves_nothing(store: ObjectStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"1" * 100_000
        raise RuntimeError("source")

    store.put("kept", [b"old"])
    for path in ("kept", "shared/new"):
        with pytest.raises(RuntimeError, match="source"):
            store.put(path, chunks())
    assert paths(store) == ["kept"]
    assert store.get("kept") == b"old"


def test_threads_swap_one_after_the_other(store: ObjectStore) -> None:
    def count() -> None:
        for _ in range(20):
            while True:
                try:
                    seen: bytes | None = store.get("n")
                except StoreNotFound:
                    seen = None
                if store.compare_and_swap("n", seen, str(int(seen or b"0") + 1).encode()):
                    break

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("n") == b"80"


PATHS = st.sampled_from(["a", "b/c", "b/d", "b/e/f"])
CONTENT = st.binary(max_size=4)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), PATHS, CONTENT),
        st.tuples(st.just("delete"), PATHS),
        st.tuples(st.just("swap"), PATHS, st.none() | CONTENT, CONTENT),
    ),
    max_size=12,
)


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_a_store_is_a_dict(make_store: MakeStore, calls: list[Any]) -> None:
    store = make_store()
    model: dict[str, bytes] = {}
    for call in calls:
        what, path, *contents = call
        if what == "put":
            store.put(path, contents)
            model[path] = contents[0]
        elif what == "delete":
            store.delete(path)
            model.pop(path, None)
        else:
            expected, content = contents
            swapped = store.compare_and_swap(path, expected, content)
            assert swapped == (model.get(path) == expected)
            if swapped:
                model[path] = content
        listed = {info.path: info.size_bytes for info in store.list("")}
        assert listed == {path: len(content) for path, content in model.items()}
        assert all(store.get(path) == content for path, content in model.items())


def _swap(root: Path, barrier: Any, name: int, wins: Any) -> None:
    store = LocalStore(root)
    expected: bytes | None = None
    for turn in range(20):
        barrier.wait(30)
        mine = f"{turn} {name}".encode()
        if store.compare_and_swap("HEAD", expected, mine):
            wins.put((turn, name))
        barrier.wait(30)
        expected = store.get("HEAD")


def test_of_several_processes_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, wins = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_swap, args=(tmp_path / "job", barrier, name, wins))
        for name in range(3)
    ]
    for process in processes:
        process.start()
    won = [wins.get(timeout=60) for _ in range(20)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(turn for turn, _ in won) == list(range(20))
    assert wins.empty()


def test_memory_has_a_limit() -> None:
    store = MemoryStore(10)
    store.put("a", [b"12345"])
    with pytest.raises(StoreFull, match=r"execution\.checkpointing\.jobmanager\.max-size"):
        store.put("b", [b"123456"])
    with pytest.raises(StoreFull, match="5 of 10 bytes"):
        store.compare_and_swap("a", b"12345", b"12345678901")
    assert store.used_bytes == 5
    store.put("a", [b"1234567890"])  # in place of the old one
    store.delete("a")
    store.put("b", [b"12345", b"67890"])
    assert store.used_bytes == 10
    with pytest.raises(StoreFull):
        store.put("c", iter([b"1"] * 11))
