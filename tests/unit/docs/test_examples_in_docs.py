"""The Python in README and docs is valid, and what is marked ``<!-- runnable -->`` builds a job.

Method: every block is compiled; the marked blocks of a file run one after the other in one namespace, as
a reader would type them, up to the job they submit, which is planned and not run.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.client.submission import PlanCollected, SubmissionOverride, submission_override
from penstock.nexmark.generator import nexmark_schema

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?P<mark><!-- runnable -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    path: Path
    line: int
    code: str
    is_runnable: bool

    def compiled(self) -> Any:
        """The code, with the line numbers of the file it stands in."""
        return compile("\n" * (self.line - 1) + self.code, str(self.path), "exec")


def blocks() -> Iterator[Block]:
    for path in FILES:
        text = path.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            code = textwrap.dedent(match["code"])
            yield Block(path, line, code, match["mark"] is not None)


BLOCKS = list(blocks())


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b.path.name}:{b.line}")
def test_python_in_the_documentation_compiles(block: Block) -> None:
    block.compiled()


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the examples name, and their directory as the working directory."""
    (tmp_path / "bids").mkdir()
    schema = nexmark_schema("bid")
    row = {"auction": 1, "bidder": 2, "price": 300, "ts": 1000, "url": "https://x", "extra": "a b"}
    bids = pa.Table.from_pylist([row | {"channel": "c"}], schema=schema)
    pq.write_table(bids, tmp_path / "bids" / "part-0.parquet")
    flight = {"date": "2001/01/01 10:00", "delay": 3, "origin": "ABC", "destination": "DEF"}
    for name in ("flights.json", "flights.jsonl"):
        (tmp_path / name).write_text(json.dumps(flight) + "\n")
    (tmp_path / "events.csv").write_text("user,at\nann,2024-05-01T12:30:00\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "path", sorted({b.path for b in BLOCKS if b.is_runnable}), ids=lambda path: path.name
)
def test_runnable_examples_build_their_jobs(
    path: Path, inputs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    # What follows a submission in a block (the use of its result) cannot run without a cluster.
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS:
        if block.path != path or not block.is_runnable:
            continue
        planned = None
        with submission_override(SubmissionOverride(plan_only=True)):
            try:
                exec(block.compiled(), namespace)
            except PlanCollected as collected:
                planned = collected.graph
        assert planned is not None or capsys.readouterr().out, f"line {block.line} builds no job"


def test_the_first_example_of_the_readme_is_run() -> None:
    assert any(block.is_runnable and block.path.name == "README.md" for block in BLOCKS)
    assert sum(block.is_runnable for block in BLOCKS if block.path.name == "api.md") >= 8
