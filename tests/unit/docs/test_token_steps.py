"""Aim: the lines with which operations.md exchanges a token do so, however the file ends.

Method: a shell runs them, and a keyring reads what they leave.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from penstock.client.keyring import Keyring

_DOCUMENT = Path(__file__).parents[3] / "docs" / "operations.md"
_STEPS = [one for one in _DOCUMENT.read_text().splitlines() if one.startswith("cp -p token ")]
_RENAME, _WRITE_INTO = "mv token.new token", "cat token.new > token && rm token.new"

OLD, NEW = "the-old-token", "the-new-token"


def run(step: str, directory: Path, **variables: str) -> int:
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        ["sh", "-c", step], cwd=directory, env=environment, capture_output=True, check=False
    ).returncode


@pytest.mark.parametrize("end", ["", "\n"], ids=["without newline", "with newline"])
@pytest.mark.parametrize("last", [_RENAME, _WRITE_INTO], ids=["rename", "write into"])
def test_the_steps_of_the_document_exchange_a_token(tmp_path: Path, end: str, last: str) -> None:
    assert _WRITE_INTO in _DOCUMENT.read_text()
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(OLD + end)
    held = []
    for step in _STEPS:
        assert run(step.replace(_RENAME, last), tmp_path, NEW=NEW) == 0
        held.append(Keyring.read(path).text.split())
    assert held == [[OLD, NEW], [NEW, OLD], [NEW]]
    assert os.listdir(tmp_path) == ["token"]  # noqa: PTH208 - names are what counts


@pytest.mark.parametrize("step", _STEPS, ids=["1", "2", "3"])
def test_a_step_that_fails_leaves_the_file(tmp_path: Path, step: str) -> None:
    path = tmp_path / "token"
    path.write_text(OLD)
    (tmp_path / "token.new").mkdir()  # where the copy goes into
    assert run(step, tmp_path) != 0
    assert path.read_text() == OLD
