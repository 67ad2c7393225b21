"""From values as they were stored to values as they are declared now.

A struct may gain fields (null, or the ``default=`` of ``ps.field``), lose fields and rename them (``alias=``), at any
depth; integers and floats may become wider; a value may get a time to live, which begins when it is restored.
Everything else is refused: a value would be lost, or mean something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import JobRejected, StreamError
from penstock.storage.codec import Stamped, StateCodec, codec_of

ALIAS: Final = b"penstock.alias"
DEFAULT: Final = b"penstock.default"

_Convert = Callable[[Any], Any]


class MigrationRefusedError(StreamError):
    """Stored values cannot become what is declared; the message says why, without naming the state."""


def field(
    name: str,
    type: Any,
    *,
    alias: str | None = None,
    default: Any = None,
) -> pa.Field:
    """A field of a struct in a state, with what becomes of values that were stored before it was there.

    Args:
        name: of the field.
        type: an Arrow type.
        alias: what the field was called when values were stored.
        default: what it is where stored values have no such field.

    Raises:
        JobRejected: the default is none of the type.

    Example: ``pa.struct([ps.field("total", pa.int64(), alias="sum"), ps.field("seen", pa.int64(), default=0)])``
    """
    metadata: dict[bytes, bytes] = {}
    if alias is not None:
        metadata[ALIAS] = alias.encode()
    if default is not None:
        codec = codec_of(type)
        try:
            metadata[DEFAULT] = codec.encode(codec.to_stored(default))
        except ValueError as error:
            raise JobRejected(
                f"field {name!r}: default={default!r} is no {codec.expected} {error}"
            ) from error
    return pa.field(name, type, metadata=metadata or None)


def migration(old: StateCodec, new: StateCodec, now_ms: int = 0) -> _Convert | None:
    """What makes the stored form of ``new`` of that of ``old``; None = it is the same.

    Args:
        now_ms: when values that get a time to live count as written.

    Raises:
        MigrationRefusedError: there is none.
    """
    if old.name == new.name:
        return None
    old_value, new_value = _inner(old), _inner(new)
    if isinstance(old, Stamped) and not isinstance(new, Stamped):
        raise MigrationRefusedError("values were stored with a time to live, and have none now")
    convert = _of_values(old_value, new_value)

    def inner(stored: Any) -> Any:
        if convert is None:
            return stored
        return new_value.to_stored(convert(old_value.to_value(stored)))

    if isinstance(old, Stamped):
        return lambda stored: (inner(stored[0]), stored[1])
    if isinstance(new, Stamped):
        return lambda stored: (inner(stored), now_ms)
    return inner


def _inner(codec: StateCodec) -> StateCodec:
    return codec.inner if isinstance(codec, Stamped) else codec


def _of_values(old: StateCodec, new: StateCodec) -> _Convert | None:
    if old.name == new.name:
        return None
    if old.value_type is None or new.value_type is None:
        raise _refused(old.expected, new.expected)
    return _of_types(old.value_type, new.value_type)


def _of_types(old: pa.DataType, new: pa.DataType) -> _Convert:
    if old.equals(new) and not pt.is_nested(new):
        return _same
    if pt.is_struct(old) and pt.is_struct(new):
        return _of_structs(old, new)
    if pt.is_map(old) and pt.is_map(new):
        key, item = _of_types(old.key_type, new.key_type), _of_types(old.item_type, new.item_type)
        return _unless_none(lambda entries: {key(k): item(v) for k, v in entries.items()})
    if _is_list(old) and _is_list(new):
        sizes = [one.list_size if pt.is_fixed_size_list(one) else -1 for one in (old, new)]
        if sizes[1] not in (-1, sizes[0]):
            raise _refused(old, new)
        item = _of_types(old.value_type, new.value_type)
        return _unless_none(lambda items: [item(one) for one in items])
    if not _is_wider(old, new):
        raise _refused(old, new)
    return _same


def _of_structs(old: pa.DataType, new: pa.DataType) -> _Convert:
    before = {one.name: one for one in old}
    made: list[tuple[str, str, _Convert]] = []
    given: dict[str, Any] = {}
    for one in new:
        metadata = one.metadata or {}
        alias = metadata.get(ALIAS, b"").decode()
        source = before.get(one.name) or before.get(alias)
        if source is not None:
            try:
                made.append((one.name, source.name, _of_types(source.type, one.type)))
            except MigrationRefusedError as error:
                raise MigrationRefusedError(f"field {one.name!r}: {error}") from error
        elif DEFAULT in metadata:
            codec = codec_of(one.type)
            given[one.name] = codec.to_value(codec.decode(metadata[DEFAULT]))
        else:
            given[one.name] = None

    def convert(value: Any) -> Any:
        return given | {name: inner(value[source]) for name, source, inner in made}

    return _unless_none(convert)


def _is_list(type_: pa.DataType) -> bool:
    return pt.is_list(type_) or pt.is_large_list(type_) or pt.is_fixed_size_list(type_)


def _is_wider(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether every value of the one is the same value of the other."""
    if pt.is_floating(old) and pt.is_floating(new):
        return bool(old.bit_width <= new.bit_width)
    if not (pt.is_integer(old) and pt.is_integer(new)):
        return False
    if pt.is_signed_integer(old) == pt.is_signed_integer(new):
        return bool(old.bit_width <= new.bit_width)
    return bool(pt.is_signed_integer(new) and old.bit_width < new.bit_width)


def _same(value: Any) -> Any:
    return value


def _unless_none(convert: _Convert) -> _Convert:
    return lambda value: None if value is None else convert(value)


def _refused(old: object, new: object) -> MigrationRefusedError:
    return MigrationRefusedError(f"values were stored as {old}, and are declared as {new}")
