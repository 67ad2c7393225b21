"""What a state of keyed objects is called, holds and how its values are encoded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import pyarrow as pa

from penstock.storage.codec import ABSENT

__all__ = ["ABSENT", "StateDescriptor", "StateKind", "ValueCodec"]


class ValueCodec(Protocol):
    """Turns values into bytes and Arrow columns and back; see ``penstock.storage.codec``.

    What a table holds is the *stored* form of a value: the value itself where it cannot be changed in
    place (``is_immutable``), else its encoded bytes, so that what user code was handed and then changed
    can never reach a snapshot.
    """

    @property
    def name(self) -> str:
        """Stable name with version, stored beside the state: "arrow.int64/1", "msgpack/1"."""

    @property
    def is_immutable(self) -> bool:
        """The stored form is the value itself."""

    @property
    def column_type(self) -> pa.DataType:
        """Type of the column that stored values become."""

    def encode(self, stored: Any) -> bytes:
        """A stored value as bytes (databases)."""

    def decode(self, data: bytes) -> Any:
        """The stored value of ``encode``."""

    def column(self, stored: list[Any]) -> pa.Array:
        """n stored values as an array of ``column_type`` (files)."""

    def stored(self, column: pa.Array) -> list[Any]:
        """The n stored values of ``column``."""


class StateKind(Enum):
    """What a key has in a state."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"


@dataclass(frozen=True, slots=True)
class StateDescriptor:
    """A state of keyed objects.

    Attributes:
        name: unique within the operator.
        codec: of values, of a list's items, of a map's values.
        key_codec: of a map's keys (immutable, hashable).
        ttl_ms: 0 = for ever. Else every stored value is the tuple ``(stored, stamp_ms)``, and one with
            ``stamp_ms + ttl_ms <= now`` may be removed at any time; ``codec`` handles the tuples.
        number_kind: "int64", "float64" or "bool" where a compiled function uses it and it has no time to live.
    """

    name: str
    kind: StateKind
    codec: ValueCodec
    key_codec: ValueCodec | None = None
    ttl_ms: int = 0
    number_kind: str = ""
