"""Whether declared columns are in the files, as far as the client can see them.

A declared column that is in no row of JSON would be null in every row, without a word. JSON may be sparse, so it is
refused only where the files have an undeclared column of a name that is near, and warned of otherwise.
Every file of the other formats has a list of its columns, and must have all that are read.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Collection, Sequence

import pyarrow as pa

from penstock.connectors.inference import (
    SAMPLE_BYTES,
    SAMPLED_FILES_MAX,
    file_names,
    first_csv_row,
)
from penstock.connectors.json_shape import JsonShape, detect_shape
from penstock.connectors.listing import ListedFile
from penstock.connectors.messages import delimiter_hint, name_list, nearest_name
from penstock.connectors.text_options import TextOptions, read_head
from penstock.errors import JobRejected

_log = logging.getLogger("penstock")

_SAMPLED_ROWS = 1000
_NEAR = 0.75
"""Above the likeness of first_name and last_name, below that of nmae and name."""


def check_declared(
    format: str,
    declared: Sequence[str],
    files: Sequence[ListedFile],
    partitions: Callable[[str], frozenset[str]],
    options: TextOptions,
    *,
    required: Collection[str] = (),
) -> None:
    """Refuses declared columns that the first files do not have.

    Args:
        format: "parquet" | "csv" | "json" | "arrow"
        declared: the columns that are read.
        files: the files that are there.
        partitions: path -> columns that the file's directories give.
        options: of text.
        required: those that the schema says are never null.

    Raises:
        JobRejected: names file, column and the nearest name.
    """
    known: set[str] = set()
    rows = 0
    for file in files[:SAMPLED_FILES_MAX]:
        given = partitions(file.path) | options.optional
        wanted = [name for name in declared if name not in given]
        try:
            if format == "json":
                sample = _sampled_objects(file.path, options)
                known.update(*sample)
                rows += len(sample)
                continue
            if format == "csv" and not options.header and len(declared) > 1:
                hint = delimiter_hint(first_csv_row(file.path, options), options.delimiter)
                if hint:
                    _log.warning("%s: %s", file.path, hint)
            names = file_names(format, file.path, options)
        except (JobRejected, pa.ArrowException, OSError, ValueError):
            # What cannot be read here is for the machines that run the tasks to say.
            continue
        missing = [name for name in wanted if names is not None and name not in names]
        if missing and names is not None:
            hint = delimiter_hint(names, options.delimiter) if format == "csv" else ""
            raise JobRejected(
                f'{file.path}: has no column "{missing[0]}"{nearest_name(missing[0], names)}; its '
                f"columns: {name_list(names)}; {hint or 'every file of a source must have all its columns'}"
            )
    if rows:
        given = options.optional.union(*(partitions(file.path) for file in files))
        absent = [name for name in declared if name not in given and name not in known]
        _check_sparse(absent, known.difference(declared), required)


def _check_sparse(
    absent: Sequence[str], others: Collection[str], required: Collection[str]
) -> None:
    undeclared = {name.lower(): name for name in sorted(others)}
    they_have = f"; they have {name_list(sorted(others))}, not declared" if others else ""
    for name in absent:
        close = difflib.get_close_matches(name.lower(), undeclared, n=1, cutoff=_NEAR)
        if close:
            raise JobRejected(
                f'schema: no row of the first files has the column "{name}"; they have '
                f'"{undeclared[close[0]]}", which is not declared: did you mean that? Otherwise give '
                f'optional=["{name}"]'
            )
        if name in required:
            raise JobRejected(
                f'schema: no row of the first files has the column "{name}", which is declared as never null'
                f'{they_have}; give optional=["{name}"] if they may be without it'
            )
        _log.warning(
            'schema: no row of the first files has the column "%s": it is null until one does%s; '
            'optional=["%s"] says that this is meant',
            name,
            they_have,
            name,
        )


def _sampled_objects(path: str, options: TextOptions) -> list[list[str]]:
    """The keys of the first objects of a JSON file."""
    text = read_head(path, SAMPLE_BYTES, options)
    shape, offset = detect_shape(text)
    if shape is JsonShape.EMPTY:
        return []
    from penstock.connectors.file_samples import array_lines

    body = text[offset:]
    lines = (
        array_lines(body, _SAMPLED_ROWS)
        if shape is JsonShape.ARRAY
        else body.split(b"\n", _SAMPLED_ROWS)[:_SAMPLED_ROWS]
    )
    keys: list[list[str]] = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a bad record when the job runs, or cut off by the sample's end
        if isinstance(value, dict):
            keys.append(list(value))
    return keys
