"""What a compiled function may be written in, and what it may not: found with its line, before anything is compiled."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from penstock.errors import JobRejected


class NotCompilable(JobRejected):
    """A function is not written in what is compiled; the message says where and why."""


def refuse(node: ast.AST | int, why: str) -> NotCompilable:
    """What is wrong at a place."""
    line = node if isinstance(node, int) else getattr(node, "lineno", 0)
    return NotCompilable(f"line {line}: {why}")


def stored_names(body: Iterable[ast.AST]) -> list[ast.Name]:
    """Where a function gives values to names."""
    return [
        node
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


class AssignedNames:
    """Which variables surely have a value, statement by statement.

    Example: what only one way gives a value to has none behind both.
        >>> body = ast.parse("if row.a:\\n    x = 1\\nelse:\\n    y = x\\n").body
        >>> AssignedNames().check(body)
        Traceback (most recent call last):
        penstock.loops.dialect.NotCompilable: line 4: 'x' may have no value here: give it one before
    """

    def __init__(self) -> None:
        self._locals: set[str] = set()

    def check(self, body: list[ast.stmt]) -> None:
        """Looks at a whole function.

        Raises:
            NotCompilable: a variable may be read before it has a value.
        """
        self._locals = {name.id for name in stored_names(body)}
        self._block(body, set())

    def _block(self, body: list[ast.stmt], known: set[str]) -> set[str] | None:
        """What is known behind these; None = they are not passed."""
        for statement in body:
            behind = self._statement(statement, known)
            if behind is None:
                return None
            known = behind
        return known

    def _statement(self, statement: ast.stmt, known: set[str]) -> set[str] | None:
        match statement:
            case ast.If(test=test, body=body, orelse=other):
                self._read(test, known)
                ways = [self._block(each, set(known)) for each in (body, other)]
                passed = [way for way in ways if way is not None]
                return set.intersection(*passed) if passed else None
            case ast.While(test=test, body=body):
                self._read(test, known)
                self._block(body, set(known))
                return known
            case ast.For(target=target, iter=over, body=body):
                self._read(over, known)
                self._block(body, known | {name.id for name in stored_names([target])})
                return known
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                return None
            case ast.Assign(targets=targets, value=value):
                self._read(value, known)
                return known | {name.id for name in targets if isinstance(name, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                self._read(value, known)
                return known | {name}
            case ast.AugAssign(target=target, value=value):
                self._read(value, known)
                if isinstance(target, ast.Name):
                    self._known(target, known)
                return known
            case _:
                self._read(statement, known)
                return known

    def _read(self, node: ast.AST, known: set[str]) -> None:
        for name in _names_read(node):
            self._known(name, known)

    def _known(self, name: ast.Name, known: set[str]) -> None:
        if name.id in self._locals and name.id not in known:
            raise refuse(name, f"{name.id!r} may have no value here: give it one before")


def _names_read(node: ast.AST) -> Iterator[ast.Name]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            yield each
