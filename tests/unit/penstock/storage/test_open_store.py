"""Aim: a store is had by its name, and by nothing else.

Method: names of each kind; and the sources of whoever merely uses a store.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigurationError
from penstock.storage.open_store import open_store, substore

ROOT = Path(__file__).parents[4]


def test_a_directory_by_its_path_and_by_its_uri(tmp_path: Path) -> None:
    open_store(substore(str(tmp_path), "job")).put("a", [b"1"])
    assert (tmp_path / "job" / "a").read_bytes() == b"1"
    for name in (f"file://{tmp_path}", f"FILE://{tmp_path}/", str(tmp_path)):
        assert open_store(substore(name, "job")).get("a") == b"1"


@pytest.mark.parametrize("uri", ["s3://bucket/prefix", "file://host/path", "hdfs://x/y"])
def test_what_names_no_store_is_refused(uri: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{uri}' names no store: give the path"):
        open_store(uri)


def test_who_merely_uses_a_store_does_not_choose_its_kind() -> None:
    makers = {"penstock/storage/open_store.py", "penstock/storage/local_store.py"}
    found = {
        str(path.relative_to(ROOT))
        for top in ("penstock", "jobmanager", "taskmanager", "common")
        for path in (ROOT / top).rglob("*.py")
        if "LocalStore" in path.read_text()
    }
    assert found == makers
