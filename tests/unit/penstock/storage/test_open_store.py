"""Aim: a store is had by its name, and by nothing else.

Method: names of each kind; and the sources of whoever merely uses a store.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import Configuration
from penstock.errors import ConfigurationError
from penstock.storage.open_store import open_store, use_s3
from penstock.storage.s3.settings import S3Settings
from penstock.storage.store_names import substore, whole_name

ROOT = Path(__file__).parents[4]


def test_a_directory_by_its_path_and_by_its_uri(tmp_path: Path) -> None:
    open_store(substore(str(tmp_path), "job")).put("a", [b"1"])
    assert (tmp_path / "job" / "a").read_bytes() == b"1"
    for name in (f"file://{tmp_path}", f"FILE://{tmp_path}/", str(tmp_path)):
        assert open_store(substore(name, "job")).get("a") == b"1"


@pytest.mark.parametrize(
    "uri",
    [
        *(
            "s3://",
            "s3:///prefix",
            "file://host/path",
            "hdfs://x/y",
            "s3a://x/y",
        ),
        *("s3:", "s3:/bucket/a", "S3:bucket", "file:/srv/kept", "file:kept", "s3a:/bucket/a"),
    ],
)
def test_what_names_no_store_is_refused(uri: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{uri}' names no store: give the path"):
        open_store(uri)


def test_a_prefix_with_an_empty_part_is_refused_with_how_it_is_to_be_written() -> None:
    told = "'s3://bucket//a//b' has an empty part in its prefix.*: write s3://bucket/a/b$"
    with pytest.raises(ConfigurationError, match=told):
        open_store("s3://bucket//a//b")


def test_nothing_below_what_names_no_bucket_is_a_store() -> None:
    for uri in ("s3://", "s3:///", "S3://"):
        with pytest.raises(ConfigurationError, match="names no store"):
            open_store(substore(uri, "savepoint-1"))


def test_names_as_users_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for text, whole in (
        ("kept/", f"{tmp_path}/kept"),
        ("./s3:/kept", f"{tmp_path}/s3:/kept"),
        ("~/kept//one/", "/home/me/kept/one"),
        ("file:///srv/kept/", "file:///srv/kept/"),
        ("s3://bucket/kept", "s3://bucket/kept"),
    ):
        assert whole_name(text) == whole
    for text in ("", " ", "\n"):
        with pytest.raises(ConfigurationError, match="the path is empty"):
            whole_name(text)
    for text in ("s3:/bucket/kept", "file:kept", "s3:"):
        with pytest.raises(ConfigurationError, match=f"'{text}' names no store"):
            whole_name(text)


def test_a_bucket_and_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shown in (
        ("s3://bucket/a/b", "s3://bucket/a/b/"),
        ("s3://bucket/a/", "s3://bucket/a/"),
        ("S3://bucket", "s3://bucket/"),
    ):
        assert repr(open_store(name)) == f"S3Store({shown!r})"
    assert repr(open_store(substore("s3://bucket/a/", "job"))) == "S3Store('s3://bucket/a/job/')"
    monkeypatch.setattr("penstock.storage.open_store._s3", S3Settings)
    one, other = open_store("s3://bucket/a"), open_store("s3://other/b")
    assert one.can_copy_from(other)
    use_s3(lambda: S3Settings(endpoint="http://127.0.0.1:9"))
    assert not open_store("s3://bucket/a").can_copy_from(other)


def test_secrets_are_not_shown() -> None:
    config = Configuration.from_mapping({"s3.access-key": "who", "s3.secret-key": "hidden"})
    assert "hidden" not in repr(config) + repr(config.s3) + str(config.of_job())
    assert config.of_job() == {}
    for wrong in ({"s3.secret-key": "hidden"}, {"s3.secret-key": ["hidden"]}):
        with pytest.raises(ConfigurationError, match=r"s3\.secret-key") as caught:
            Configuration.from_mapping(wrong)
        assert "hidden" not in str(caught.value)


def test_who_merely_uses_a_store_does_not_choose_its_kind() -> None:
    makers = {"penstock/storage/open_store.py", "penstock/storage/local_store.py"}
    found = {
        str(path.relative_to(ROOT))
        for top in ("penstock", "jobmanager", "taskmanager", "common")
        for path in (ROOT / top).rglob("*.py")
        if "LocalStore" in path.read_text()
    }
    assert found == makers
