"""What a compiled part of a job does, step by step: data that travels, and that Spark's DataFrames are made by.

Each step makes one frame of earlier ones; frames are numbered, inputs first. The last one is the result.
"""

from __future__ import annotations

from dataclasses import dataclass

Column = tuple[str, str]
"""A name and the SQL of its values."""


@dataclass(frozen=True, slots=True)
class Select:
    """Replaces the columns."""

    frame: int
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Where:
    """Keeps the rows for which a condition is true."""

    frame: int
    condition: str


@dataclass(frozen=True, slots=True)
class GroupRows:
    """One row per key: the keys, then the aggregates."""

    frame: int
    keys: tuple[str, ...]
    aggregates: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class JoinFrames:
    """Pairs of rows of two frames, whose names are all different.

    Attributes:
        how: as Spark calls it: "inner", "left", "right", "full".
    """

    left: int
    right: int
    condition: str
    how: str


@dataclass(frozen=True, slots=True)
class UnionAll:
    """All rows of frames with the same columns in the same order."""

    frames: tuple[int, ...]


Step = Select | Where | GroupRows | JoinFrames | UnionAll


def step_text(step: Step) -> str:
    """A step as a person reads it.

    Example:
        >>> step_text(Where(0, "`a` > 1L"))
        'where #0: `a` > 1L'
    """
    match step:
        case Select(frame, columns):
            return f"select #{frame}: {_columns(columns)}"
        case Where(frame, condition):
            return f"where #{frame}: {condition}"
        case GroupRows(frame, keys, aggregates):
            return f"group #{frame} by {', '.join(keys)}: {_columns(aggregates)}"
        case JoinFrames(left, right, condition, how):
            return f"{how} join #{left} #{right} on {condition}"
        case UnionAll(frames):
            return f"union {' '.join(f'#{frame}' for frame in frames)}"


def _columns(columns: tuple[Column, ...]) -> str:
    return ", ".join(f"{name} = {text}" for name, text in columns)
