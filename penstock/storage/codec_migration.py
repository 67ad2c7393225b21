"""From values as they were stored to values as they are declared now.

A struct may gain fields (null, or the ``default=`` of ``ps.field``), lose fields and rename them (``alias=``), at any
depth; integers and floats may become wider; a value may get a time to live, which begins when it is restored.
Everything else is refused: a value would be lost, or mean something else. So is a field of which values were stored
under its name and under its alias: only the user knows which of the two it goes on with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import JobRejected, StreamError
from penstock.storage.codec import Stamped, StateCodec, codec_of

ALIAS: Final = b"penstock.alias"
DEFAULT: Final = b"penstock.default"
OTHER_NAME: Final = "declare it as it was, or give it another name, with which it begins empty"
"""What can be done about a state, or a field, that cannot become what is declared."""

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
        raise MigrationRefusedError(
            f"values were stored with a time to live, and have none now: {OTHER_NAME}"
        )
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


def check_fields(type_: pa.DataType) -> None:
    """Refuses a type in which it is not clear what a stored field would become.

    Raises:
        JobRejected: two fields have one name or one alias, or the alias of one is the name of another.
    """
    for inner in _inner_types(type_):
        check_fields(inner)
    if not pt.is_struct(type_):
        return
    names = Counter(one.name for one in type_)
    aliases = Counter(alias for one in type_ if (alias := _alias(one)))
    for one in type_:
        alias = _alias(one)
        if names[one.name] > 1:
            raise JobRejected(f"{type_} has {names[one.name]} fields {one.name!r}: rename them")
        if alias in names:
            raise JobRejected(
                f"field {one.name!r}: alias={alias!r} is another field of {type_}: what was stored as {alias!r} goes on "
                "as that, so leave the alias out, or rename the other field"
            )
        if aliases[alias] > 1:
            raise JobRejected(
                f"field {one.name!r}: alias={alias!r} is the alias of another field of {type_} as well: what was stored "
                "as that can become one of them only"
            )


def field_changes(old: StateCodec, new: StateCodec) -> str:
    """Which fields of stored structs are left out, and which begin without a value of theirs; "" = none."""
    before, after = _inner(old).value_type, _inner(new).value_type
    return "" if before is None or after is None else "; ".join(_field_changes(before, after))


def _field_changes(old: pa.DataType, new: pa.DataType, place: str = "") -> Iterator[str]:
    if not (pt.is_struct(old) and pt.is_struct(new)):
        for before_inner, inner in zip(_inner_types(old), _inner_types(new), strict=False):
            yield from _field_changes(before_inner, inner, place)
        return
    before = {one.name: one for one in old}
    sources = {one.name: _source(one, before) for one in new}
    kept = {source.name for source in sources.values() if source is not None}
    if gone := ", ".join(repr(place + name) for name in before if name not in kept):
        yield f"without {gone}"
    for one in new:
        source = sources[one.name]
        if source is not None:
            yield from _field_changes(source.type, one.type, f"{place}{one.name}.")
        else:
            begins = "its default" if DEFAULT in (one.metadata or {}) else "null"
            yield f"{place + one.name!r} begins as {begins}"


def _inner_types(type_: pa.DataType) -> list[pa.DataType]:
    if pt.is_map(type_):
        return [type_.key_type, type_.item_type]
    return [type_.field(index).type for index in range(type_.num_fields)]


def _alias(field: pa.Field) -> str:
    """What it was called before; "" = nothing else."""
    alias: str = (field.metadata or {}).get(ALIAS, b"").decode()
    return "" if alias == field.name else alias


def _source(field: pa.Field, before: Mapping[str, pa.Field]) -> pa.Field | None:
    """The stored field that becomes this one; None = it is new."""
    alias = _alias(field)
    if field.name in before and alias in before:
        raise MigrationRefusedError(
            f"field {field.name!r}: values were stored with {field.name!r} and with its alias {alias!r}: leave the alias "
            f"out to go on with {field.name!r}, or give the field another name to go on with {alias!r}"
        )
    return before.get(field.name) or before.get(alias)


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
        source = _source(one, before)
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
    return MigrationRefusedError(
        f"values were stored as {old}, and are declared as {new}: {OTHER_NAME}"
    )
