"""Aim: the page of the architecture shows the folders and layers that there are.

Method: its tables against the contracts of import-linter, which the build checks against the imports.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def contracts() -> dict[str, list[str]]:
    """Package -> its layers, from top to bottom, as the build checks them."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {
        contract["containers"][0]: contract["layers"]
        for contract in linter["contracts"]
        if "containers" in contract
    }


@pytest.mark.parametrize("package", ["penstock", "jobmanager", "taskmanager"])
def test_the_page_shows_the_layers(package: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split(f"| layer of `{package}/` |", 1)[1].split("\n\n", 1)[0]
    shown = [set(re.findall(r"`(\w+)/?`", row.split("|")[1])) for row in table.splitlines()[2:]]
    layers = [set(layer.split(" | ")) - {"__main__"} for layer in contracts()[package]]
    wanted = [layer for layer in layers if layer]
    assert shown == wanted


def test_a_user_loads_no_daemon() -> None:
    text = (
        "import sys, penstock, penstock.testing\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'jobmanager', 'taskmanager', 'common'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True)
