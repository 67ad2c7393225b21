"""Transcripts: a script of steps, and below each step what came out of it, in one text file that people read.

A file begins with a paragraph of comment that says what it shows. Then come blocks: the lines of a step, a line
``----``, and what came out. A blank line ends a block. Lines that start with ``#`` belong to the reader.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

SEPARATOR = "----"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One block: what is done, and what the file says came out.

    Attributes:
        comment: what stands above it, blank lines included.
        lines: of the step.
        expected: lines below the separator.
    """

    comment: tuple[str, ...]
    lines: tuple[str, ...]
    expected: tuple[str, ...]


def parse(text: str) -> list[Step]:
    """The blocks of a file.

    Raises:
        ValueError: a step has no separator, or the file does not begin with what it shows.
    """
    if not text.startswith("#"):
        raise ValueError("a transcript begins with a comment: what it shows")
    steps: list[Step] = []
    comment: list[str] = []
    lines: list[str] = []
    expected: list[str] | None = None
    for line in [*text.splitlines(), ""]:
        if expected is not None:
            if line:
                expected.append(line)
                continue
            steps.append(Step(tuple(comment), tuple(lines), tuple(expected)))
            comment, lines, expected = [""], [], None
        elif line == SEPARATOR:
            expected = []
        elif not lines and (not line or line.startswith("#")):
            comment += [line] if line or (comment and comment[-1]) else []
        else:
            lines.append(line)
    if lines:
        raise ValueError(f"the step {lines[0]!r} has no line {SEPARATOR}")
    return steps


def played(steps: Iterable[Step], play: Callable[[Sequence[str]], Sequence[str]]) -> str:
    """The file as it reads when every step is followed by what comes out of it now."""
    written: list[str] = []
    for step in steps:
        # A blank line would end the block.
        written += [
            *step.comment,
            *step.lines,
            SEPARATOR,
            *(line or "." for line in play(step.lines)),
        ]
    return "\n".join(written) + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows below each other, with the names of their columns above them."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([shown(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def shown(value: object) -> str:
    """A value as a person writes it: no class of a module, no default that says nothing."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None:
        return "null"
    if isinstance(value, dt.datetime):
        return _time(value)
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(shown, value))) + "}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in value.items()) + "}"
    if dataclasses.is_dataclass(value) and type(value).__str__ is object.__str__:
        fields = [
            f"{field.name}={shown(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if field.repr and not _is_default(field, getattr(value, field.name))
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    return str(value)


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def _time(value: dt.datetime) -> str:
    text = value.replace(tzinfo=None).isoformat(sep=" ", timespec="auto")
    return text.removeprefix("1970-01-01 ").removesuffix("000")
