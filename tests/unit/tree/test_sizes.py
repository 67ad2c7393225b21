"""Aim: files and functions of the product stay small enough to be read as one thing.

Method: lines of each file and, by the syntax tree, of each function. What is over a limit is listed with its size,
which may only shrink; what is not over any more has to leave the list.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
PRODUCT = ("penstock", "common", "jobmanager", "taskmanager")
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60

FILES_OVER: dict[str, int] = {}
FUNCTIONS_OVER: dict[str, int] = {}


def product() -> dict[str, str]:
    """Path -> text of the modules that are not generated."""
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for top in PRODUCT
        for path in (ROOT / top).rglob("*.py")
        if "_pb2" not in path.name
    }


def functions(text: str) -> dict[str, int]:
    """Qualified name -> lines, from ``def`` to the end; of doubles (overloads, properties) the longest."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, prefix)
                continue
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                assert child.end_lineno is not None, "parsed from text"
                found[name] = max(found.get(name, 0), child.end_lineno - child.lineno + 1)
            visit(child, f"{name}.")

    visit(ast.parse(text), "")
    return found


def complaints(sizes: dict[str, int], limit: int, listed: dict[str, int]) -> list[str]:
    """What is too long, has grown, or is listed for nothing."""
    grown = [
        f"{name}: {lines} lines, at most {max(limit, listed.get(name, 0))}"
        for name, lines in sizes.items()
        if lines > max(limit, listed.get(name, 0))
    ]
    kept = [f"{name}: take it off the list" for name in listed if sizes.get(name, 0) <= limit]
    return sorted(grown + kept)


def test_files_are_not_too_long() -> None:
    sizes = {module: len(text.splitlines()) for module, text in product().items()}
    assert complaints(sizes, FILE_LINES_MAX, FILES_OVER) == []


def test_functions_are_not_too_long() -> None:
    sizes = {
        f"{module}:{name}": lines
        for module, text in product().items()
        for name, lines in functions(text).items()
    }
    assert complaints(sizes, FUNCTION_LINES_MAX, FUNCTIONS_OVER) == []


def test_what_grows_and_what_is_listed_for_nothing_is_found() -> None:
    sizes = {"new": 11, "grown": 13, "shrunk": 12, "short": 10}
    listed = {"grown": 12, "shrunk": 13, "short": 11, "gone": 11}
    assert complaints(sizes, 10, listed) == [
        "gone: take it off the list",
        "grown: 13 lines, at most 12",
        "new: 11 lines, at most 10",
        "short: take it off the list",
    ]
    assert functions("class A:\n    def b(self):\n        def c(): ...\n        return 1\n") == {
        "A.b": 3,
        "A.b.c": 1,
    }
