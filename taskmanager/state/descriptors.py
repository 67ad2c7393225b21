"""What a state of keyed objects is called, holds and how its values are encoded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.storage.codec import ABSENT, StateCodec

__all__ = ["ABSENT", "StateDescriptor", "StateKind"]


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
    codec: StateCodec
    key_codec: StateCodec | None = None
    ttl_ms: int = 0
    number_kind: str = ""
