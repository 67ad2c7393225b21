"""Aim: the tutorial does what it says. Method: its files and commands, in its order, in an empty directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?:<!-- (?P<what>install|file: (?P<file>\S+)) -->\n)?^```(?:sh|python)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
DEADLINE_S = 200


@pytest.mark.integration
@pytest.mark.timeout(180)
def test_the_tutorial(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    work = tmp_path / "empty"
    work.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(home), "PATH": path}
    environment.pop("PENSTOCK_DIR", None)
    told = ""

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    try:
        for block in BLOCK.finditer((ROOT / "docs" / "tutorial.md").read_text()):
            if block["what"] == "install":
                assert "pip install" in block["text"]
                run("penstock --version")
            elif block["file"]:
                (work / block["file"]).write_text(block["text"])
            else:
                told += run(block["text"])
    finally:
        run("penstock cluster stop --dir cluster")
    assert len(re.findall(r"^auction \d+: \d+ bids", told, re.MULTILINE)) == 3
    assert re.search(r"^killed \S+ of process \d+$", told, re.MULTILINE)
    assert re.search(r"^\d+ rows, each of them once$", told, re.MULTILINE)


@pytest.mark.integration
def test_the_first_program_of_the_readme_runs_when_pasted(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    program = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert program is not None
    (tmp_path / "hot_items.py").write_text(program[1])
    done = subprocess.run(
        [sys.executable, "hot_items.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FINISHED")
    assert list((tmp_path / "out").glob("*.parquet"))
