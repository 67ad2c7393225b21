"""Lists, tuples and dicts of plain values as bytes that are data alone, in one call of C.

They are written in the opcodes that pickle has for None, bool, int, float, str, bytes, list, tuple and dict, whose
instances alone, not those of subclasses, it writes without asking: whatever else is met is asked for, and refused here.
So nothing that is written names a class or a function, and what is read must not: bytes that do are damaged.

Protocol 3 is the last in which sets and bytearrays are asked for, and has no frames. Nothing is written by reference:
equal values give equal bytes, whichever of their parts are one object.

Such bytes begin with ``80 03``; to msgpack ``80`` is an empty dict, behind which nothing comes.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn

import msgpack
from typing_extensions import override

from penstock.errors import StoreCorrupt

_PROTOCOL: Final = 3
BEGINNING: Final = bytes([0x80, _PROTOCOL])
_SURROGATES_LEAD: Final = 0xED
_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
"""Half a character, or bytes of a number that look like one."""
CONTAINERS: Final = frozenset({list, tuple, dict})
"""Types of the values that are written so."""
_KEPT_BYTES_MAX: Final = 1 << 16
"""A pickler begins with as much memory as its largest value took, and an unpickler holds the last: so large ones go."""


class _OtherValueError(Exception):
    """A value has a part of another type."""


class _Pickler(pickle.Pickler):
    @override
    def reducer_override(self, obj: Any) -> NoReturn:
        raise _OtherValueError


class _Written:
    """A file that keeps what is written to it."""

    __slots__ = ("parts", "write")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.write = self.parts.append


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise StoreCorrupt(f"stored plain values name {module_name}.{global_name}")


_Writer = tuple[Callable[[Any], None], list[bytes]]
"""What writes a value, and where; making one takes longer than to write most values."""


def _new_writer() -> _Writer:
    written = _Written()
    pickler = _Pickler(written, _PROTOCOL)
    pickler.fast = True
    return pickler.dump, written.parts


class _Reader:
    """An unpickler and the file it reads, of which all that is left can be seen ahead: it is read in one call."""

    __slots__ = ("data", "load", "place")

    def __init__(self) -> None:
        self.data, self.place = b"", 0
        self.load = _Unpickler(self).load

    def peek(self, _size: int) -> bytes:
        return self.data[self.place :] if self.place else self.data

    def read(self, size: int) -> bytes:
        self.place += size
        return b""  # nobody looks: it was seen ahead, or is not there

    def readline(self) -> bytes:
        raise StoreCorrupt("stored plain values have lines")


_writers: Final[list[_Writer]] = []
_readers: Final[list[_Reader]] = []
"""Those that nobody uses, at most one for each thread; taking one and giving it back are one step each. One that
an error was met with is not given back."""


def written(value: Any) -> bytes | None:
    """A list, tuple or dict as bytes; None = it has parts of other types, or is no tree.

    Example: the same bytes whether parts are one object or two; a date is left to others.
        >>> import datetime
        >>> part = (1, 2.5)
        >>> written([part, part]) == written([(1, 2.5), (1, 2.5)])
        True
        >>> read(written({"a": (1, [b"x", None])}))
        {'a': (1, [b'x', None])}
        >>> written([datetime.date(2026, 1, 1)])
    """
    try:
        writer = _writers.pop()
    except IndexError:
        writer = _new_writer()
    dump, parts = writer
    try:
        dump(value)
    except (_OtherValueError, pickle.PicklingError, ValueError, OverflowError, RecursionError):
        return None
    data = parts.pop()
    if parts or len(data) > _KEPT_BYTES_MAX:
        data = b"".join([*parts, data])  # long texts are written by themselves
    else:
        _writers.append(writer)
    return None if _SURROGATES_LEAD in data and not _is_text(value, data) else data


def _is_text(value: Any, data: bytes) -> bool:
    """Whether all texts of a value are, as far as msgpack can tell: half a character is none."""
    if not _SURROGATE.search(data):
        return True
    try:
        msgpack.packb(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return False
    return True


def read(data: bytes) -> Any:
    """Inverse of ``written``.

    Raises:
        StoreCorrupt: the bytes are damaged.
    """
    try:
        reader = _readers.pop()
    except IndexError:
        reader = _Reader()
    reader.data, reader.place = data, 0
    try:
        value = reader.load()
    except StoreCorrupt:
        raise
    except _DAMAGE as error:
        raise StoreCorrupt(f"stored plain values cannot be read: {error}") from error
    if reader.place != len(data):
        raise StoreCorrupt(f"behind stored plain values are {len(data) - reader.place} bytes more")
    if len(data) <= _KEPT_BYTES_MAX:
        _readers.append(reader)
    return value


_DAMAGE: Final = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
)
"""What reading damaged bytes ends with."""
