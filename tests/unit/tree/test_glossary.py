"""Aim: names that could be taken for each other are told apart in the glossary, and are those of the code.

Method: the table of names is read, and each looked up among the classes and the short names of modules.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = [
    path.read_text()
    for top in ("penstock", "common", "jobmanager", "taskmanager")
    for path in (ROOT / top).rglob("*.py")
    if "_pb2" not in path.name
]
NAMES = {
    "StoreCheckpoint", "FailJob", "JobPhase", "GroupPhase", "CheckpointPhase", "SubtaskPhase", "AttemptKey", "HeldPartitions",
    "HeldPartitionsReport", "CheckpointFiles", "ArtifactStore", "SlotTable",
}  # fmt: skip


def table_of_names() -> str:
    return (ROOT / "docs" / "glossary.md").read_text().partition("| name | meaning |")[2]


def test_names_of_the_code_that_are_easily_confused_are_told_apart() -> None:
    named = set(re.findall(r"`(\w+)`", table_of_names()))
    assert named - {"Phase", "c", "job_events", "job_effects"} == NAMES
    for name in NAMES:
        found = [text for text in SOURCES if re.search(rf"^class {name}\b", text, re.MULTILINE)]
        assert len(found) == 1, f"{name} is one class, and the glossary says which"


def test_a_short_name_stands_for_one_module() -> None:
    short: dict[str, set[str]] = {"c": set()}
    for text in SOURCES:
        pattern = r"^from ([\w.]+) import (\w+) as (c)$"
        for package, module, name in re.findall(pattern, text, re.MULTILINE):
            short[name].add(f"{package}.{module}")
    assert short == {"c": {"jobmanager.checkpoint.messages"}}
