"""Whether the fields of declared structs are in the files, as far as the client can see them.

A field that no struct of the files has is null in every row, in every format: readers fill it in. That may be meant,
since structs grow, so it is not refused but warned of.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pyarrow as pa

from penstock.connectors.inference import SAMPLED_FILES_MAX, file_schema
from penstock.connectors.messages import nearest_name
from penstock.connectors.text_options import TextOptions
from penstock.errors import JobRejected

_log = logging.getLogger("penstock")


def warn_of_absent_fields(
    format: str, declared: pa.Schema, paths: Sequence[str], options: TextOptions
) -> None:
    """Warns of declared fields of structs that none of the first files has."""
    nested = [field for field in declared if pa.types.is_nested(field.type)]
    if not nested or format == "csv":
        return
    found: dict[str, list[pa.DataType]] = {}
    for path in paths[:SAMPLED_FILES_MAX]:
        try:
            schema = file_schema(format, path, options)
        except (JobRejected, pa.ArrowException, OSError, ValueError):
            # What cannot be read here is for the machines that run the tasks to say.
            continue
        for field in schema or ():
            found.setdefault(field.name, []).append(field.type)
    for field in nested:
        for name, hint in _absent(field.name, field.type, found.get(field.name, [])):
            _log.warning(
                'schema: none of the first files has the field "%s"%s: it is null until one does',
                name,
                hint,
            )


def _absent(
    name: str, declared: pa.DataType, found: Sequence[pa.DataType]
) -> Iterator[tuple[str, str]]:
    """The declared fields at and below a type that none of the found ones has, with a nearest name."""
    if _is_list(declared):
        items = [type_.value_type for type_ in found if _is_list(type_)]
        yield from _absent(name, declared.value_type, items)
    if not pa.types.is_struct(declared):
        return
    structs = [type_ for type_ in found if pa.types.is_struct(type_)]
    for field in declared if structs else ():
        same = [
            struct.field(field.name)
            for struct in structs
            if struct.get_field_index(field.name) >= 0
        ]
        if same:
            yield from _absent(f"{name}.{field.name}", field.type, [item.type for item in same])
        else:
            others = sorted({item.name for struct in structs for item in struct})
            yield f"{name}.{field.name}", nearest_name(field.name, others)


def _is_list(type_: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(type_) for is_kind in kinds)
