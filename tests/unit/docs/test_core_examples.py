"""Aim: each pure core that the architecture names shows its rule in an example, and the example is true.

Method: the modules in the table of cores of docs/architecture.md; their doctests.
"""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
LINK = re.compile(r"\]\(\.\./([a-z_/]+)\.py\)")


def named_cores() -> list[str]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("| decision | core | its shell |") :]
    rows = ROW.findall(table[: table.index("\n\n")])
    return [link.replace("/", ".") for _, cores, _ in rows for link in LINK.findall(cores)]


def test_there_are_cores() -> None:
    assert len(named_cores()) > 40


@pytest.mark.parametrize("name", named_cores())
def test_a_core_shows_its_rule(name: str) -> None:
    ran = doctest.testmod(importlib.import_module(name))
    assert ran.failed == 0
    assert ran.attempted >= 2, f"{name} has no example of its rule"
