"""Aim: failures carry labels, and whoever makes labels can harm no job.

Method: causes in, labels out; enrichers that do everything wrong; loading from this environment.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jobmanager.dispatcher.failure_enricher_loader import load_failure_labels
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.failure_enricher import FailureLabels
from penstock.errors import ConfigurationError

CAUSE = FailureCause("TaskFailure", "ValueError: seven", traceback="Traceback", operator="map")


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (CAUSE, "USER"),
        (FailureCause("TaskFailure", "no such file", operator="read_csv"), "USER"),
        (FailureCause("BadRecord", "line 3", row="x,y"), "DATA"),
        (FailureCause("TaskFailure", "x", cause_chain=("TaskFailure", "BadRecord")), "DATA"),
        (FailureCause("NoResourceAvailable", "needs 9 slots"), "RESOURCE"),
        (FailureCause("TaskFailure", "x", "Tr", cause_chain=("MemoryError",)), "RESOURCE"),
        (FailureCause("StoreTransient", "chk-7: No space left on device"), "RESOURCE"),
        (FailureCause("TaskFailure", "x: Disk quota exceeded"), "RESOURCE"),
        (FailureCause("TaskFailure", "x", cause_chain=("TaskFailure", "StoreFull")), "RESOURCE"),
        (FailureCause("NotReproducible", "other rows than before"), "USER"),
        (FailureCause("TaskManagerLost", "silent"), "SYSTEM"),
        (FailureCause("PartitionUnavailable", "reset", vertex="v1", operator="window"), "SYSTEM"),
        (FailureCause("TaskFailure", "slot process 7 was killed by SIGKILL"), "SYSTEM"),
    ],
)
def test_the_type_says_who_has_to_act(cause: FailureCause, kind: str) -> None:
    assert FailureLabels().of(cause) == {"type": kind}


class Team:
    def labels(self, cause: FailureCause) -> Mapping[str, str]:
        return {"team": "payments", "operator": cause.operator, "type": "MINE"}


class Returns:
    def __init__(self, value: Any) -> None:
        self.value = value

    def labels(self, cause: FailureCause) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class BrokenMapping(dict[str, str]):
    def items(self) -> Any:
        raise RuntimeError("no items")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (ZeroDivisionError("oops"), "raised ZeroDivisionError: oops"),
        (None, "NoneType"),
        (["type"], "list"),
        ({"a": 1}, "must be text"),
        ({1: "a"}, "must be text"),
        ({"": "a"}, "empty"),
        ({"a": "x" * 300}, "longer than 255"),
        ({str(n): "x" for n in range(99)}, "99 labels"),
        (BrokenMapping(a="b"), "no items"),
    ],
)
def test_an_enricher_that_is_wrong_is_reported_and_skipped(value: Any, problem: str) -> None:
    reported: list[tuple[str, str]] = []
    labels = FailureLabels(
        [("bad", Returns(value)), ("team", Team())],
        lambda name, why: reported.append((name, why)),
    )
    # A label that is there stays: the type is not the second enricher's.
    assert labels.of(CAUSE) == {"type": "USER", "team": "payments", "operator": "map"}
    ((name, why),) = reported
    assert name == "bad"
    assert problem in why


# ---------------------------------------------------------------- loading


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution with one enricher, where this interpreter finds it."""
    (tmp_path / "enrichers_of_ours.py").write_text(
        "class Team:\n"
        "    def labels(self, cause):\n"
        "        return {'team': cause.error_class}\n"
        "class Raises:\n"
        "    def __init__(self):\n"
        "        raise OSError('no licence')\n"
        "class Nothing:\n"
        "    pass\n"
    )
    info = tmp_path / "enrichers_of_ours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: enrichers-of-ours\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[penstock.failure_enrichers]\nteam = enrichers_of_ours:Team\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "enrichers_of_ours", raising=False)
    return tmp_path


@pytest.mark.parametrize("names", ["team", "enrichers_of_ours:Team", " team , "])
def test_enrichers_are_loaded_by_name(installed: Path, names: str) -> None:
    assert load_failure_labels(names).of(CAUSE) == {"type": "USER", "team": "TaskFailure"}


@pytest.mark.parametrize("names", ["", " ,"])
def test_without_names_there_is_the_type(names: str) -> None:
    assert load_failure_labels(names).of(CAUSE) == {"type": "USER"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unheard-of", "no such entry point"),
        ("enrichers_of_ours:Missing", "Missing"),
        ("no_such_module:Team", "no_such_module"),
        ("enrichers_of_ours:Raises", "no licence"),
        ("enrichers_of_ours:Nothing", "no method labels"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_at_start(installed: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match="failure-enrichers") as refused:
        load_failure_labels(f"team, {name}" if "ours" in name else name)
    assert why in str(refused.value)
    assert name in str(refused.value)
