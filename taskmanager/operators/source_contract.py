"""What a source's methods must return: anything else would be an obscure error later on, or rows that are not read.

What does not fit is the source's own mistake, which no restart mends.

>>> checked_splits("Mine", (Split(id) for id in "ab"))
[Split(id='a', payload=b'', size=0, min_event_time_ms=None, replaces=()), Split(id='b', payload=b'', size=0, min_event_time_ms=None, replaces=())]
>>> checked_position("MyReader", None)
Traceback (most recent call last):
penstock.errors.Unrecoverable: MyReader.position() returned None (NoneType); it must return bytes, from which another reader goes on
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from penstock.connectors.source import Reader, Split
from penstock.errors import Unrecoverable
from penstock.rows.column_values import short_repr


def checked_splits(source: str, found: object) -> list[Split]:
    """What ``discover`` returned, a list or another iterable, as a list.

    Raises:
        Unrecoverable: it is none, something else than a split is in it, a split's attribute has another type, or
            two splits have one id.
    """
    if not isinstance(found, Iterable) or isinstance(found, str | bytes):
        raise _wrong(f"{source}.discover()", found, "a list of ps.Split, [] where there is none")
    splits: dict[str, Split] = {}
    for split in found:
        if not isinstance(split, Split):
            raise _wrong(f"{source}.discover()", split, "a list of ps.Split(id=...)", "a list with")
        _check_split(source, split)
        if split.id in splits:
            raise Unrecoverable(
                f"discover() lists split {split.id!r} twice, and splits are told apart by their ids: only one would be read"
            )
        splits[split.id] = split
    return list(splits.values())


def _check_split(source: str, split: Split) -> None:
    for name, value, wanted, fits in (
        ("id", split.id, "text", isinstance(split.id, str)),
        ("payload", split.payload, "bytes", isinstance(split.payload, bytes)),
        ("size", split.size, "an integer", _is_integer(split.size)),
        (
            "min_event_time_ms",
            split.min_event_time_ms,
            "an integer, or None",
            split.min_event_time_ms is None or _is_integer(split.min_event_time_ms),
        ),
    ):
        if not fits:
            raise Unrecoverable(
                f"{source}.discover() returned a split whose {name} is {_described(value)}; it must be {wanted}"
            )


def checked_reader(source: str, opened: object) -> Reader:
    """What ``open`` returned.

    Raises:
        Unrecoverable: it is no reader.
    """
    if not isinstance(opened, Reader):
        raise _wrong(f"{source}.open()", opened, "an object of a class derived from ps.Reader")
    return opened


def checked_position(reader: str, position: object) -> bytes:
    """What ``position`` returned. None in its place would be the start of the split, and its rows would come twice.

    Raises:
        Unrecoverable: it is not bytes.
    """
    if not isinstance(position, bytes):
        wanted = "bytes, from which another reader goes on"
        if isinstance(position, str):
            wanted += ": str(...).encode()"
        raise _wrong(f"{reader}.position()", position, wanted)
    return position


def checked_milliseconds(method: str, value: object) -> int | None:
    """A time or duration that a method returned, or None.

    Raises:
        Unrecoverable: it is neither an integer nor None.
    """
    if value is None:
        return None
    if not _is_integer(value):
        raise _wrong(f"{method}()", value, "milliseconds as an integer, or None")
    return operator.index(value)  # type: ignore[arg-type]


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _described(value: object) -> str:
    return f"{short_repr(value)} ({type(value).__name__})"


def _wrong(what: str, returned: object, wanted: str, in_a: str = "") -> Unrecoverable:
    return Unrecoverable(
        f"{what} returned {in_a}{' ' if in_a else ''}{_described(returned)}; it must return {wanted}"
    )
