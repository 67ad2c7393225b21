"""Aim: every metric that documents, alerts and the dashboard name is one that daemons show, and all of these are documented.

Method: names found in the files, against those that the test of the composed cluster finds at its daemons.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.metric_names import OF_JOBMANAGER, OF_TASKMANAGER, WITH_TLS

ROOT = Path(__file__).parents[3]
NAMING = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(path for path in sorted((ROOT / "deploy").rglob("*")) if path.suffix in (".yml", ".json")),
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "tests/integration/deploy/alerts_test.yml",
]
SHOWN = OF_JOBMANAGER | OF_TASKMANAGER | WITH_TLS
NAME = re.compile(r"\bpenstock_(?:subtask|job|jobmanager|taskmanager|s3|file_store)_\w*[a-z]\b")


def names_in(path: Path) -> set[str]:
    return set(NAME.findall(path.read_text()))


@pytest.mark.parametrize("path", NAMING, ids=lambda path: str(path.relative_to(ROOT)))
def test_metrics_that_are_named_are_shown(path: Path) -> None:
    assert names_in(path) - SHOWN == set()


def test_metrics_that_are_shown_are_documented_and_asked_for() -> None:
    assert names_in(ROOT / "docs/operations.md") == SHOWN
    for asking in ("prometheus/alerts.yml", "grafana/dashboards/penstock.json"):
        assert len(names_in(ROOT / "deploy" / asking)) > 15
