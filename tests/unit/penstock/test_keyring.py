"""Aim: a token is exchanged by writing its file, and what cannot be used changes nothing.

Method: a keyring and its file, step by step.
"""

from __future__ import annotations

import errno
from pathlib import Path
from threading import Event

import pytest
from prometheus_client import CollectorRegistry

from common import keyring_runner
from common.daemon_metrics import TokenCollector
from penstock.client.credentials import load_token, token_metadata
from penstock.client.keyring import Keyring, keyring_of, parse_tokens
from penstock.errors import ConfigurationError

OLD, NEW = "the-old-token", "the-new-token"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    write(path, OLD)
    return path


def write(path: Path, *tokens: str) -> None:
    """Beside it, and renamed."""
    beside = path.with_suffix(".new")
    beside.touch(mode=0o600)
    beside.write_text("\n".join(tokens) + "\n")
    beside.rename(path)


def refreshes(keyring: Keyring) -> bool:
    """Two looks: what is new counts when it is the same at the second one."""
    return keyring.refresh() or keyring.refresh()


def taken(keyring: Keyring) -> list[str]:
    return [token for token in (OLD, NEW) if keyring.accepts(token)]


def test_a_token_is_exchanged_in_three_steps(path: Path) -> None:
    keyring = load_token(str(path))
    steps = [
        ((OLD, NEW), OLD, [OLD, NEW]),
        ((NEW, OLD), NEW, [OLD, NEW]),
        ((NEW,), NEW, [NEW]),
    ]
    for tokens, shown, accepted in steps:
        write(path, *tokens)
        assert refreshes(keyring)
        assert not refreshes(keyring)
        assert (keyring.shown, taken(keyring), keyring.count) == (shown, accepted, len(tokens))
        assert token_metadata(keyring) == (("authorization", f"Bearer {shown}"),)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n\n",
        "half",
        f"{NEW}\nshort\n",
        "-----BEGIN PRIVATE KEY-----\n" + "a" * 64,
        f"{NEW}\n" * 9,
        f"# {NEW}\n{NEW}\n",
        f"security.token: {NEW}\ntaskmanager.slots: 4\n",
    ],
    ids=["empty", "blank", "cut off", "one cut off", "a key", "too many", "commented", "another's"],
)
def test_what_cannot_be_used_leaves_what_was_read_and_is_said_once(
    path: Path, content: str
) -> None:
    keyring = load_token(str(path))
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="the token file") as caught:
        refreshes(keyring)
    assert NEW not in str(caught.value)
    assert not refreshes(keyring)
    assert taken(keyring) == [OLD]
    write(path, NEW)
    assert refreshes(keyring)
    assert taken(keyring) == [NEW]


def test_a_file_that_is_gone_or_that_others_can_read_changes_nothing(path: Path) -> None:
    keyring = load_token(str(path))
    path.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        refreshes(keyring)
    path.write_text(NEW)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="other users"):
        refreshes(keyring)
    assert taken(keyring) == [OLD]
    path.chmod(0o600)
    # Nothing but its mode is another.
    assert refreshes(keyring)


def test_a_file_that_is_being_written_counts_when_it_is_whole(path: Path) -> None:
    keyring = load_token(str(path))
    path.write_text(NEW[:-1])
    assert not keyring.refresh()
    path.write_text(f"{NEW}\n")
    assert not keyring.refresh()
    assert taken(keyring) == [OLD]
    assert keyring.refresh()
    assert taken(keyring) == [NEW]


def test_a_file_that_could_not_be_read_is_read_again_and_said_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyring = load_token(str(path))
    write(path, NEW)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", _stale)
        with pytest.raises(ConfigurationError, match="Stale"):
            refreshes(keyring)
        assert not refreshes(keyring)
    assert keyring.refresh()
    assert taken(keyring) == [NEW]


def _stale(path: Path, *_: object) -> None:
    raise OSError(errno.ESTALE, "Stale file handle", str(path))


def test_nothing_that_goes_wrong_ends_the_looks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyring, looks = load_token(str(path)), Event()
    monkeypatch.setattr(keyring_runner, "_LOOK_INTERVAL_S", 0.001)

    def fail() -> bool:
        if keyring.older_count:
            looks.set()
        keyring.older_count += 1
        raise MemoryError

    monkeypatch.setattr(keyring, "refresh", fail)
    with keyring_runner.refreshed(keyring):
        assert looks.wait(10)


def test_who_shows_an_older_token_is_counted(path: Path) -> None:
    write(path, NEW, OLD)
    keyring = Keyring.read(path)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TokenCollector("jobmanager", keyring))
    for given in (NEW, "another-token", OLD, NEW, OLD):
        keyring.accepts(given)
    assert registry.get_sample_value("penstock_jobmanager_older_token_calls_total") == 2


def test_where_there_is_no_token_only_none_is_accepted() -> None:
    for none in (keyring_of(""), Keyring(())):
        assert not none
        assert (none.shown, none.text, none.count, none.place) == ("", "", 0, "")
        assert none.accepts("")
        assert not none.accepts(OLD)


def test_a_slot_is_told_what_its_daemon_has_and_nobody_prints_it(path: Path) -> None:
    write(path, NEW, OLD)
    keyring = Keyring.read(path)
    assert taken(Keyring(parse_tokens(keyring.text, "told"))) == [OLD, NEW]
    assert keyring.place == str(path)
    assert NEW not in f"{keyring} {keyring!r}"
    assert not keyring.accepts(keyring.text)
