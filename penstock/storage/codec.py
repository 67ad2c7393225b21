"""What values of state look like when they are stored: versioned codecs with stable names.

A codec knows three forms of a value:

- the *value*, as the user's function sees it;
- the *stored* form, which tables hold: the value itself where it cannot be changed in place
  (``is_immutable``), else its encoded bytes. What user code was handed and then changed can therefore
  never reach a snapshot, and every value handed out is the caller's own;
- *bytes* (databases) and *columns* (files) of stored forms.

Which codec a state uses is part of the state: its ``name`` is stored beside it, and ``codec_of`` makes
the codec again from the name alone. A codec whose encoding changes gets a new version in its name, and
the old one stays readable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, Final

import pyarrow as pa
from typing_extensions import override

from penstock.errors import StoreCorrupt, StreamError


class _Absent(Enum):
    ABSENT = "ABSENT"

    @override
    def __repr__(self) -> str:
        return "ABSENT"


ENTRY_ARROW: Final = " -> "
"""Between the codecs of the keys and of the values of a map, where they are named together."""
ABSENT: Final = _Absent.ABSENT
"""Stands in a column for a key that has no value there (None is a value)."""


class StateError(StreamError):
    """State was used in a way it cannot be: a value of the wrong type, no key, the wrong place."""


class StateCodec(ABC):
    """One encoding of values of one type; see the module.

    Attributes:
        name: stable, with version: "arrow.int64/1".
        is_immutable: the stored form is the value itself.
        column_type: of the column that stored values become.
        expected: what values are, for errors: "int64".
        value_type: the Arrow type of the values, None where they have none.
        exact_type: the Python type whose every instance is its own stored form; None = ask ``to_stored``.
    """

    name: str
    is_immutable: bool
    column_type: pa.DataType
    expected: str
    value_type: pa.DataType | None = None
    exact_type: type | None = None

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return codec_of, (self.name,)

    def for_keys(self) -> StateCodec:
        """The codec of the same values as keys of a map: equal keys are encoded as the same bytes."""
        return self

    @abstractmethod
    def to_stored(self, value: Any) -> Any:
        """The stored form of a value.

        Raises:
            ValueError: the value does not fit; the message says why, in words that follow "got ...".
        """

    @abstractmethod
    def to_value(self, stored: Any) -> Any:
        """The value of a stored form; the caller's own where values can be changed in place."""

    @abstractmethod
    def encode(self, stored: Any) -> bytes:
        """A stored value as bytes (databases)."""

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """The stored value of ``encode``."""

    @abstractmethod
    def column(self, stored: list[Any]) -> pa.Array:
        """n stored values as an array of ``column_type`` (files)."""

    @abstractmethod
    def stored(self, column: pa.Array) -> list[Any]:
        """The n stored values of ``column``."""


class EncodedCodec(StateCodec):
    """Base of codecs whose stored form is bytes."""

    is_immutable = False
    column_type = pa.large_binary()

    @override
    def encode(self, stored: Any) -> bytes:
        assert isinstance(stored, bytes)
        return stored

    @override
    def decode(self, data: bytes) -> Any:
        return data

    @override
    def column(self, stored: list[Any]) -> pa.Array:
        return pa.array(stored, pa.large_binary())

    @override
    def stored(self, column: pa.Array) -> list[Any]:
        return list(column.to_pylist())


class Stamped(StateCodec):
    """Stored values with the time they were written: the tuples ``(stored, stamp_ms)`` of a TTL state."""

    _STAMP_BYTES = 8

    def __init__(self, inner: StateCodec) -> None:
        self.inner = inner
        self.name = f"{_STAMPED}{inner.name}"
        self.is_immutable = inner.is_immutable
        self.expected = inner.expected
        self.value_type = inner.value_type
        stamp = pa.field("stamp_ms", pa.int64(), nullable=False)
        self.column_type = pa.struct([pa.field("value", inner.column_type), stamp])

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Stamped, (self.inner,)

    @override
    def to_stored(self, value: Any) -> Any:
        value, stamp_ms = value
        return self.inner.to_stored(value), stamp_ms

    @override
    def to_value(self, stored: Any) -> Any:
        value, stamp_ms = stored
        return self.inner.to_value(value), stamp_ms

    @override
    def encode(self, stored: Any) -> bytes:
        value, stamp_ms = stored
        stamp: bytes = stamp_ms.to_bytes(self._STAMP_BYTES, "little", signed=True)
        return stamp + self.inner.encode(value)

    @override
    def decode(self, data: bytes) -> Any:
        stamp_ms = int.from_bytes(data[: self._STAMP_BYTES], "little", signed=True)
        return self.inner.decode(data[self._STAMP_BYTES :]), stamp_ms

    @override
    def column(self, stored: list[Any]) -> pa.Array:
        values = self.inner.column([value for value, _ in stored])
        stamps = pa.array([stamp_ms for _, stamp_ms in stored], pa.int64())
        return pa.StructArray.from_arrays([values, stamps], fields=list(self.column_type))

    @override
    def stored(self, column: pa.Array) -> list[Any]:
        values, stamps = column.flatten()
        return list(zip(self.inner.stored(values), stamps.to_pylist(), strict=True))


def codec_of(name_or_type: str | pa.DataType) -> StateCodec:
    """The codec of a stored name, or of the values of an Arrow type.

    Args:
        name_or_type: "arrow.int64/1", "msgpack/1", "stamped/1:arrow.int64/1", or a type.

    Raises:
        StateError: state cannot hold values of the type.
        StoreCorrupt: the name is none that this version knows.
    """
    from penstock.storage.arrow_codecs import arrow_codec
    from penstock.storage.plain_codecs import MsgpackCodec, PickleCodec
    from penstock.storage.type_names import parse_type

    if not isinstance(name_or_type, str):
        return arrow_codec(name_or_type)
    name = name_or_type
    if name.startswith(_STAMPED):
        return Stamped(codec_of(name[len(_STAMPED) :]))
    if name == MsgpackCodec.name:
        return MsgpackCodec()
    if name == PickleCodec.name:
        return PickleCodec()
    if name.startswith(ARROW_PREFIX) and name.endswith(ARROW_SUFFIX):
        return arrow_codec(parse_type(name[len(ARROW_PREFIX) : -len(ARROW_SUFFIX)]))
    raise StoreCorrupt(
        f"values encoded as {name!r} cannot be read by this version of Penstock; read them with the "
        "version that wrote them"
    )


ARROW_PREFIX: Final = "arrow."
ARROW_SUFFIX: Final = "/1"
_STAMPED: Final = "stamped/1:"
