"""Aim: one name, one thing: no two classes of the product share a name, so a word in a log or a trace leads to one file.

Method: public classes at the top of all modules that are not generated.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
PRODUCT = ("penstock", "common", "jobmanager", "taskmanager")
SHARED: dict[str, str] = {
    "JobPlan": "users' word for what env.plan() shows, and the JobManager's for the same graph as it runs it",
}
"""Names that two classes may share, with the reason."""


def names(text: str) -> list[str]:
    """Public classes that a module defines at its top."""
    classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return [node.name for node in classes if not node.name.startswith("_")]


def doubles(modules: dict[str, str]) -> dict[str, list[str]]:
    """Name -> the modules that define it, where there are several."""
    where: dict[str, list[str]] = defaultdict(list)
    for module, text in modules.items():
        for name in names(text):
            where[name].append(module)
    return {name: sorted(found) for name, found in where.items() if len(found) > 1}


def test_a_name_is_one_class() -> None:
    modules = {
        str(path.relative_to(ROOT)): path.read_text()
        for top in PRODUCT
        for path in (ROOT / top).rglob("*.py")
        if "_pb2" not in path.name
    }
    found = doubles(modules)
    unknown = {name: where for name, where in found.items() if name not in SHARED}
    assert not unknown, f"{unknown}: give one of them a name of its own"
    assert set(SHARED) <= set(found), "a shared name that is not shared any more"


def test_doubles_are_found() -> None:
    modules = {"a": "class Slot: ...\nclass _Own: ...\n", "b": "class Slot: ...\nclass _Own: ...\n"}
    assert doubles(modules) == {"Slot": ["a", "b"]}
