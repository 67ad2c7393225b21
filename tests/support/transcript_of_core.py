"""Plays the transcript of a core: each step is a line or more of Python, beside it what the core answered.

The first step is ``core`` and the name of the module; its names are those that the steps may use. Operators that say
nothing without a JobManager, a server or other jobs are played so, too: ``operator MODULE: kind, kind``.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvariantViolation, StreamError
from tests.support.transcripts import shown, table


class CorePlayer:
    """Evaluates steps in the names of a module."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}

    def play(self, lines: Sequence[str]) -> list[str]:
        """What came out of one step."""
        if lines[0].startswith(("core ", "operator ")):
            name = lines[0].split()[1].rstrip(":")
            self._names.update(vars(importlib.import_module(name)))
            lines = lines[1:]
        answers: list[list[str]] = []
        for statement in ast.parse("\n".join(lines)).body:
            if isinstance(statement, ast.Expr):
                answers.append(self._answer(ast.Expression(statement.value)))
            else:
                module = ast.Module([statement], type_ignores=[])
                exec(compile(module, "transcript", "exec"), self._names)
        if len(answers) == 1:
            return answers[0]
        numbered = []
        for number, answer in enumerate(answers, 1):
            numbered += [f"{number}:" + f"  {answer[0]}", *(f"    {line}" for line in answer[1:])]
        return numbered

    def _answer(self, expression: ast.Expression) -> list[str]:
        try:
            value = eval(compile(expression, "transcript", "eval"), self._names)
        except (ValueError, StreamError, InvariantViolation) as error:
            return [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
        return answer(value)


def answer(value: object) -> list[str]:
    """What a core answered, as lines: effects of one kind are a table."""
    if value is None or value == [] or value == ():
        return ["nothing"]
    if isinstance(value, str) and value:
        return value.splitlines()
    if isinstance(value, Mapping):
        return (
            table([{"": key, "is": each} for key, each in value.items()]) if value else ["nothing"]
        )
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        kinds = {type(each) for each in value}
        if len(value) > 1 and len(kinds) == 1 and dataclasses.is_dataclass(value[0]):
            names = [field.name for field in dataclasses.fields(value[0]) if field.repr]
            kind = type(value[0]).__name__
            return table([{kind: "", **{n: getattr(each, n) for n in names}} for each in value])
        if any(dataclasses.is_dataclass(each) for each in value):
            return [shown(each) for each in value]
    return [shown(value)]
