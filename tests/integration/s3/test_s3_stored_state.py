"""Aim: ``penstock state`` shows what lies on S3 as it does what lies on disk. Method: the golden set, put into a bucket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.storage.open_store import open_store
from penstock.storage.request_counts import S3_REQUESTS
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.golden_state import ARCHIVES, told, unpacked
from tests.support.radosgw import RadosGateway, s3_options

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

NEWEST = ARCHIVES[-1].parent


@pytest.mark.parametrize("name", ["rocksdb-native", "hashmap-checkpoint"])
def test_it_is_what_is_shown_of_the_same_on_disk(
    s3_server: RadosGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings = settings_of(s3_server.endpoint)
    monkeypatch.setattr("penstock.storage.open_store._s3", lambda: settings)
    options = s3_options(s3_server.endpoint)
    configuration = tmp_path / "penstock.yaml"
    configuration.write_text("".join(f"{key}: {json.dumps(one)}\n" for key, one in options.items()))
    monkeypatch.chdir(tmp_path)
    uri = f"s3://{BUCKET}/{tmp_path.name}"
    store = open_store(uri)
    directory = unpacked(NEWEST / f"{name}.tar.gz", tmp_path / "kept")
    for file in directory.rglob("*"):
        if file.is_file() and not file.name.endswith(".lock"):
            store.put(str(file.relative_to(directory)), [file.read_bytes()])
    on_disk, objects = told(str(directory)), len(store.list(""))
    S3_REQUESTS.take()
    assert told(uri)["states"] == on_disk["states"]
    requests, _, _ = S3_REQUESTS.take()
    # One for each to see that it is there, and one for what is in it, however many states that are.
    assert sum(one.count for one in requests) < 2.3 * objects
    for state in ("pairs", "fresh"):
        rows = [told(path, "states", state)["rows"] for path in (uri, str(directory))]
        assert rows[0] == rows[1] != []
