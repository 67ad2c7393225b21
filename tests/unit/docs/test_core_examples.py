"""Aim: each pure core that the architecture names shows its rule in an example, and every example is true.

Method: the doctests of the modules in the table of cores of docs/architecture.md, and of all others that have some.
"""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.support.named_cores import named_cores

ROOT = Path(__file__).parents[3]
PACKAGES = ("penstock", "jobmanager", "taskmanager", "common")


def with_examples() -> list[str]:
    """Modules that show something, and are no named cores."""
    shown = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if ">>> " in path.read_text()
    ]
    return [name for name in shown if name not in named_cores()]


def test_there_are_cores() -> None:
    assert len(named_cores()) > 40


@pytest.mark.parametrize("name", named_cores())
def test_a_core_shows_its_rule(name: str) -> None:
    ran = doctest.testmod(importlib.import_module(name))
    assert ran.failed == 0
    assert ran.attempted >= 2, f"{name} has no example of its rule"


@pytest.mark.parametrize("name", with_examples())
def test_an_example_is_true(name: str) -> None:
    ran = doctest.testmod(importlib.import_module(name))
    assert ran.failed == 0
    assert ran.attempted, f"{name} has an example that nobody runs"
