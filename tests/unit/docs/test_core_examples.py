"""Aim: each pure core that the architecture names shows its rule in an example, and the example is true.

Method: the modules in the table of cores of docs/architecture.md; their doctests.
"""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.support.named_cores import named_cores


def test_there_are_cores() -> None:
    assert len(named_cores()) > 40


@pytest.mark.parametrize("name", named_cores())
def test_a_core_shows_its_rule(name: str) -> None:
    ran = doctest.testmod(importlib.import_module(name))
    assert ran.failed == 0
    assert ran.attempted >= 2, f"{name} has no example of its rule"
