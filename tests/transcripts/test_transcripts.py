"""Aim: what each operator and each core makes of a script can be read beside it, and is what it was.

Method: the files next to this one, played step by step; those of operators on both state backends. ``make transcripts``
writes into them what comes out now, and a person reads the diff.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.pb import graph_pb2
from tests.support.named_cores import named_cores
from tests.support.transcript_of_core import CorePlayer
from tests.support.transcript_of_operator import Backend, OperatorPlayer
from tests.support.transcripts import parse, played

HERE = Path(__file__).parent
IS_REWRITING = os.environ.get("PENSTOCK_TRANSCRIPTS") == "rewrite"


def files(folder: str) -> list[Path]:
    return sorted((HERE / folder).glob("*.txt"))


@pytest.mark.parametrize("path", files("cores"), ids=lambda path: path.stem)
def test_core(path: Path) -> None:
    compare(path, played(parse(path.read_text()), CorePlayer().play))


@pytest.mark.parametrize("path", files("operators"), ids=lambda path: path.stem)
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_operator(path: Path, backend: Backend, tmp_path: Path) -> None:
    steps = parse(path.read_text())
    player = OperatorPlayer(backend, tmp_path)
    is_job = steps[0].lines[0].startswith("job")
    try:
        text = played(steps, player.play if is_job else CorePlayer().play)
    finally:
        player.close()
    compare(path, text, may_rewrite=backend == "hashmap")


def compare(path: Path, text: str, *, may_rewrite: bool = True) -> None:
    if IS_REWRITING and may_rewrite:
        path.write_text(text)
    assert text == path.read_text()


def kinds_of(operator: graph_pb2.Operator) -> set[str]:
    """What it is: "sink files", "join interval", "process keyed"."""
    kind = str(operator.WhichOneof("spec"))
    match kind:
        case "source" | "sink":
            return {f"{kind} {getattr(operator, kind).WhichOneof('kind')}"}
        case "join":
            join = operator.join
            shape = (
                "interval" if join.is_interval else _name(graph_pb2.WindowKind, join.window.kind)
            )
            return {f"join {shape}", f"join {_name(graph_pb2.JoinKind, join.how)}"}
        case "window_aggregate":
            return {f"{kind} {_name(graph_pb2.WindowKind, operator.window_aggregate.window.kind)}"}
        case "window_function":
            function = operator.window_function
            return {f"{kind} {_name(graph_pb2.WindowFunctionKind, function.kind)}"}
        case "process":
            return {f"{kind} {_name(graph_pb2.ProcessKind, operator.process.kind)}"}
        case "row_function":
            return {f"{kind} {_name(graph_pb2.RowFunctionKind, operator.row_function.kind)}"}
        case _:
            return {kind}


def _name(enum: Any, number: int) -> str:
    return str(enum.Name(number))


def every_kind() -> set[str]:
    """What a graph can hold, by its messages."""
    specs = graph_pb2.Operator.DESCRIPTOR.oneofs_by_name["spec"].fields
    found = {field.name for field in specs}
    found -= {"join", *(kind for kind, _ in ENUMS), *(kind for kind, _ in ONE_OFS)}
    for kind, enum in ENUMS:
        found |= {f"{kind} {name}" for name in enum.keys()}  # noqa: SIM118
    for kind, message in ONE_OFS:
        fields = message.DESCRIPTOR.oneofs_by_name["kind"].fields
        found |= {f"{kind} {field.name}" for field in fields}
    windows = set(graph_pb2.WindowKind.keys()) - {"WINDOW_KIND_COUNT"}  # not for joins
    return found | {
        "join interval",
        *(f"join {name}" for name in {*windows, *graph_pb2.JoinKind.keys()}),
    }


ENUMS: list[tuple[str, Any]] = [
    ("window_aggregate", graph_pb2.WindowKind),
    ("window_function", graph_pb2.WindowFunctionKind),
    ("process", graph_pb2.ProcessKind),
    ("row_function", graph_pb2.RowFunctionKind),
]
ONE_OFS: list[tuple[str, Any]] = [("source", graph_pb2.SourceSpec), ("sink", graph_pb2.SinkSpec)]

OPERATOR = re.compile(r"^operator \S+: (.+)$", re.MULTILINE)


def test_every_kind_of_operator_has_a_transcript(tmp_path: Path) -> None:
    seen: set[str] = set()
    for path in files("operators"):
        text = path.read_text()
        seen |= {kind for kinds in OPERATOR.findall(text) for kind in kinds.split(", ")}
        player = OperatorPlayer("hashmap", tmp_path)
        for step in parse(text):
            if step.lines[0].startswith("job"):
                player.play(step.lines)
        player.close()
        seen |= {kind for operator in player.operators for kind in kinds_of(operator)}
    assert not every_kind() - seen


CORE = re.compile(r"^core (\S+)$", re.MULTILINE)


def test_every_core_has_a_transcript() -> None:
    cores = {name for path in files("cores") for name in CORE.findall(path.read_text())}
    assert cores == set(named_cores())
