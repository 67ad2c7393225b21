"""Codecs of plain Python values: msgpack by default, pickle where the user asks for it by name.

With ``msgpack`` a state holds None, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, date,
time, datetime, timedelta and Decimal, nested at will; each comes back as the type it was put in as. A
time zone that is no ``ZoneInfo`` comes back as its offset. Numbers, truths, texts and bytes of numpy come
back as Python's own. Everything else is refused, subclasses of these types and other kinds of bytes
included: what comes back would be something else than what was put in.

Lists, tuples and dicts of what is neither a set nor one of the types from date on are ``plain_containers``, everything
else msgpack, as is a dict of few numbers and texts, and as was everything before; both are read.

msgpack has no tuples: one is an extension, whose content is its items as a list. A list of tuples alone, as the
whole value or as the content of an extension, is one extension (``TUPLES``) instead of one for each of them.
"""

from __future__ import annotations

import datetime as dt
import decimal
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Final
from zoneinfo import ZoneInfo

import cloudpickle
import msgpack
import numpy as np
from typing_extensions import override

from penstock.errors import StoreCorrupt
from penstock.rows.column_values import short_repr
from penstock.storage.codec import EncodedCodec
from penstock.storage.plain_containers import BEGINNING, CONTAINERS, read, written

_TUPLE, _SET, _FROZENSET, _DATETIME, _DATE, _TIME, _TIMEDELTA, _DECIMAL, _INT = range(1, 10)
TUPLES: Final = 10
"""Code of a list of tuples; its content is a list of lists."""

DEPTH_MAX: Final = 60
"""Values that are extensions within each other; each may be two. Reading one takes 40 kB of the stack, of which a thread
has 8 MB."""

EXTENSIONS: Final = {
    _TUPLE: "tuple",
    _SET: "set",
    _FROZENSET: "frozenset",
    _DATETIME: "datetime",
    _DATE: "date",
    _TIME: "time",
    _TIMEDELTA: "timedelta",
    _DECIMAL: "decimal",
    _INT: "int",
}
"""What msgpack does not know by itself: the code of its extension -> its name."""


class MsgpackCodec(EncodedCodec):
    """Plain Python values."""

    name = "msgpack/1"
    expected = "plain Python values (msgpack)"

    @override
    def to_stored(self, value: Any) -> bytes:
        kind = type(value)
        if kind is dict and len(value) <= _RECORD_MAX and _is_flat(value):
            return packed_value(value, _pack_flat)
        if kind in CONTAINERS and (data := written(value)) is not None:
            return data
        packers = _own.packers
        packers.has_numpys = False
        packed = packed_value(value)
        if packers.has_numpys:  # stored as what they come back as would be
            plain = _unpack(packed)
            if type(plain) in CONTAINERS:
                return self.to_stored(plain)
        return packed

    @override
    def to_value(self, stored: Any) -> Any:
        if stored[:2] == BEGINNING:
            return read(stored)
        try:
            return _unpack(stored)
        except (
            ValueError,
            LookupError,
            TypeError,
            ArithmeticError,
            msgpack.UnpackException,
        ) as error:
            raise StoreCorrupt(f"a stored msgpack value cannot be read: {error}") from error


class PickleCodec(EncodedCodec):
    """Any Python object. Reading runs code of the object's class, which must still be there then."""

    name = "pickle/1"
    expected = "objects that can be pickled"

    @override
    def to_stored(self, value: Any) -> bytes:
        try:
            return pickle.dumps(value, protocol=5)
        except Exception:  # noqa: BLE001 - __reduce__ of the user's class may raise anything
            pass  # the class may not be importable by name: cloudpickle takes it along
        try:
            return bytes(cloudpickle.dumps(value))
        except Exception as error:
            raise ValueError(f"which cannot be pickled: {error}") from error

    @override
    def to_value(self, stored: Any) -> Any:
        return pickle.loads(stored)


def as_msgpack(stored: bytes) -> bytes:
    """What ``MsgpackCodec`` has stored as msgpack.

    Raises:
        StoreCorrupt: the bytes are damaged.
        ValueError: it is nested too deeply.
    """
    return packed_value(read(stored)) if stored[:2] == BEGINNING else stored


def packed_value(value: Any, pack: Callable[[Any], bytes] | None = None) -> bytes:
    """A plain value as msgpack.

    Args:
        pack: what packs it, None = what can pack any.

    Raises:
        ValueError: it is none; the message says why, in words that follow "got ...".
    """
    try:
        return (pack or _pack)(value)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"which msgpack cannot hold: {error}") from error


_RECORD_MAX: Final = 4
"""Flat dicts of up to so many fields are msgpack, which reads them in half the time, from two thirds of the bytes."""
_SCALARS: Final = frozenset({bool, int, float, str, bytes, type(None)})


def _is_flat(value: dict[Any, Any]) -> bool:
    """Whether nothing that a dict holds holds anything."""
    for key, part in value.items():
        if type(part) not in _SCALARS or type(key) not in _SCALARS:
            return False
    return True


def _pack_flat(value: dict[Any, Any]) -> bytes:
    try:
        packer = _flat_packers.pop()
    except IndexError:
        packer = _new_packer()
    packed: bytes = packer.pack(value)
    if len(packed) <= _BUFFER_BYTES:
        _flat_packers.append(packer)
    return packed


def _new_packer() -> msgpack.Packer:
    return msgpack.Packer(
        default=_extended, use_bin_type=True, strict_types=True, buf_size=_BUFFER_BYTES
    )


_flat_packers: list[msgpack.Packer] = []
"""Those that no thread uses; one that an error was met with is not given back."""


class _Packers:
    """Packers of a thread, one for each value that is packed within another."""

    __slots__ = ("by_depth", "depth", "has_numpys")

    def __init__(self) -> None:
        self.depth = 0
        self.has_numpys = False
        self.by_depth: list[msgpack.Packer] = []

    def pack(self, value: Any, code: int = 0) -> bytes:
        """The packed value, or the content of an extension; making a packer takes longer than to pack most values."""
        depth, by_depth = self.depth, self.by_depth
        if depth > DEPTH_MAX:
            raise ValueError(
                f"which msgpack cannot hold: more than {DEPTH_MAX} values are nested within each other; make it flatter, or "
                "declare the state with codec='pickle'"
            )
        while depth >= len(by_depth):  # a large value within this one may have cleared them
            by_depth.append(_new_packer())
        self.depth = depth + 1
        try:
            packer = by_depth[depth]
            packed: bytes = packer.pack_ext_type(code, value) if code else packer.pack(value)
        finally:
            self.depth = depth
        return packed


_BUFFER_BYTES = 1024
"""What a packer begins with; it keeps what its largest value took, within ``_BUFFER_BYTES_MAX``."""
_BUFFER_BYTES_MAX = 1 << 20


class _PackersOfThread(threading.local):
    def __init__(self) -> None:
        self.packers = _Packers()


_own = _PackersOfThread()


def _pack(value: Any) -> bytes:
    kind, code, packers = type(value), 0, _own.packers
    if kind is tuple:
        return packers.pack(_pack(list(value)), _TUPLE)
    if kind is list and value and type(value[0]) is tuple and set(map(type, value)) == _ALL_TUPLES:
        value, code = list(map(list, value)), TUPLES
    packed = packers.pack(value)
    if len(packed) > _BUFFER_BYTES_MAX:
        packers.by_depth.clear()
    if len(packed.translate(None, _BINARY)) < len(packed):
        _refuse_other_bytes(value)
    return packers.pack(packed, code) if code else packed


_ALL_TUPLES = {tuple}
_BINARY = b"\xc4\xc5\xc6"
"""One of these bytes is before every binary value that msgpack writes; elsewhere they are seldom."""


def _refuse_other_bytes(value: Any) -> None:
    """Refuses what msgpack takes for bytes; what is in tuples and sets was packed, and looked at, before."""
    lists: list[list[Any]] = [[value]]
    dicts: list[dict[Any, Any]] = []
    while lists or dicts:
        level = partial(_parts, lists, dicts)
        kinds = set(map(type, level()))
        if not kinds.isdisjoint(_OTHER_BYTES):
            raise _no_plain_value(next(part for part in level() if type(part) in _OTHER_BYTES))
        within = [part for part in level() if type(part) is list] if list in kinds else []
        dicts = [part for part in level() if type(part) is dict] if dict in kinds else []
        lists = within


def _parts(lists: list[list[Any]], dicts: list[dict[Any, Any]]) -> Iterator[Any]:
    of_lists, keys = chain.from_iterable(lists), chain.from_iterable(dicts)
    return chain(of_lists, keys, chain.from_iterable(map(dict.values, dicts)))


_OTHER_BYTES = frozenset({bytearray, memoryview})


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_restored, raw=False, strict_map_key=False, use_list=True)


def _extended(value: Any) -> Any:
    """What msgpack does not know as what it does."""
    if type(value) is tuple:
        return _new(msgpack.ExtType, (_TUPLE, _pack(list(value))))  # whose constructor checks both
    writer = _WRITERS.get(type(value))
    if writer is not None:
        code, plain = writer
        return msgpack.ExtType(code, _pack(plain(value)))
    if isinstance(value, np.generic) and not isinstance(value, _NUMPYS_OWN):
        plain_value = value.item()
        if type(plain_value) in _PYTHONS_OWN:
            _own.packers.has_numpys = True
            return plain_value
    raise _no_plain_value(value)


_new = tuple.__new__
_NUMPYS_OWN = np.void, np.datetime64, np.timedelta64
_PYTHONS_OWN = frozenset({bool, int, float, str, bytes})


def _no_plain_value(value: Any) -> ValueError:
    return ValueError(
        f"in which {short_repr(value)} ({type(value).__name__}) is no plain Python value: convert it, for "
        "example to a dict, or declare the state with codec='pickle'"
    )


def _restored(code: int, data: bytes) -> Any:
    return _READERS[code](_unpack(data))


def _datetime_parts(value: dt.datetime) -> list[Any]:
    """Text without zone, and the zone: its name, or its offset as part of the text."""
    zone = value.tzinfo
    if isinstance(zone, ZoneInfo) and zone.key:
        return [value.replace(tzinfo=None).isoformat(), zone.key, value.fold]
    return [value.isoformat(), None, value.fold]


def _datetime_of(parts: list[Any]) -> dt.datetime:
    text, zone, fold = parts
    value = dt.datetime.fromisoformat(text)
    return value.replace(tzinfo=ZoneInfo(zone) if zone else value.tzinfo, fold=fold)


def _time_parts(value: dt.time) -> str | list[Any]:
    """Text; where that does not tell all, the parts that a datetime has."""
    zone = value.tzinfo
    if isinstance(zone, ZoneInfo) and zone.key:
        return [value.replace(tzinfo=None).isoformat(), zone.key, value.fold]
    if zone is not None and value.utcoffset() is None:
        raise ValueError(f"in which {short_repr(value)} has a time zone that is not known by name")
    return [value.isoformat(), None, value.fold] if value.fold else value.isoformat()


def _time_of(parts: str | list[Any]) -> dt.time:
    text, zone, fold = (parts, None, 0) if isinstance(parts, str) else parts
    value = dt.time.fromisoformat(text)
    return value.replace(tzinfo=ZoneInfo(zone) if zone else value.tzinfo, fold=fold)


def _timedelta_parts(value: dt.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _ordered(values: Any) -> list[Any]:
    """The members of a set, in an order that depends on the content alone; sets in them are packed once."""
    return sorted((_with_packed_sets(v) if type(v) in _HOLDING else v for v in values), key=_pack)


def _with_packed_sets(value: Any) -> Any:
    """A member of a set, or a part of one, with packed sets in place of sets."""
    if type(value) is frozenset:
        return _extended(value)
    if type(value) is tuple and not _HOLDING.isdisjoint(map(type, value)):
        return tuple(map(_with_packed_sets, value))
    return value


_HOLDING = frozenset({frozenset, tuple})

_WRITERS: dict[type, tuple[int, Callable[[Any], Any]]] = {
    set: (_SET, _ordered),
    frozenset: (_FROZENSET, _ordered),
    dt.datetime: (_DATETIME, _datetime_parts),
    dt.date: (_DATE, dt.date.isoformat),
    dt.time: (_TIME, _time_parts),
    dt.timedelta: (_TIMEDELTA, _timedelta_parts),
    decimal.Decimal: (_DECIMAL, str),
    int: (_INT, str),  # beyond 64 bits
}
_READERS: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    TUPLES: lambda rows: list(map(tuple, rows)),
    _SET: set,
    _FROZENSET: frozenset,
    _DATETIME: _datetime_of,
    _DATE: dt.date.fromisoformat,
    _TIME: _time_of,
    _TIMEDELTA: lambda parts: dt.timedelta(*parts),
    _DECIMAL: decimal.Decimal,
    _INT: int,
}
