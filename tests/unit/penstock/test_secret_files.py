"""Aim: a secret is read where its user alone can read it, or where a container engine has mounted it.

Method: modes and owners; tables of mounts as the kernel writes them; a real mount in a namespace of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.client import secret_files
from penstock.client.secret_files import mount_of, read_secret
from penstock.errors import ConfigurationError


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("of-this-user\n")
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_what_nobody_else_can_read_is_read(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    assert read_secret(secret, "the token file") == "of-this-user\n"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o640, 0o620, 0o602])
def test_what_others_can_read_or_write_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"the token file can be read.*{mode:04o}.*chmod"):
        read_secret(secret, "the token file")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_refused(secret: Path) -> None:
    secret.chmod(0o600)
    os.chown(secret, 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to user 65534"):
        read_secret(secret, "the token file")


def test_a_link_is_as_open_as_what_it_leads_to(secret: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(secret)
    secret.chmod(0o644)
    with pytest.raises(ConfigurationError, match=str(secret)):
        read_secret(link, "the token file")
    secret.chmod(0o600)
    assert read_secret(link, "the token file") == "of-this-user\n"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the token file cannot be read"):
        read_secret(tmp_path, "the token file")
    with pytest.raises(ConfigurationError, match="no file with one secret"):
        read_secret(Path("/dev/zero"), "the token file")


MOUNTS = """\
36 1 0:31 / / rw,relatime - overlay overlay rw
37 36 0:32 / /run rw - tmpfs tmpfs rw
38 37 8:1 /home/me/penstock-token /run/secrets/penstock-token ro,relatime - ext4 /dev/sda1 rw
39 37 0:40 / /run/secrets\\040of\\040others ro - tmpfs tmpfs rw
40 37 0:41 / /run/secrets/pod rw - tmpfs tmpfs ro
"""


@pytest.mark.parametrize(
    ("path", "point", "is_read_only"),
    [
        ("/run/secrets/penstock-token", "/run/secrets/penstock-token", True),
        ("/run/secrets/other", "/run", False),
        ("/run/secrets of others/x", "/run/secrets of others", True),
        ("/run/secrets/pod/token", "/run/secrets/pod", True),
        ("/etc/penstock/token", "/", False),
    ],
)
def test_mounts(path: str, point: str, is_read_only: bool) -> None:
    assert mount_of(Path(path), MOUNTS) == (Path(point), is_read_only)


READ = """
import sys
from pathlib import Path
from penstock.errors import ConfigurationError
from penstock.client import secret_files
from penstock.client.secret_files import read_secret
try:
    print(read_secret(Path("/run/secrets/penstock-token"), "the token file").strip())
except ConfigurationError as error:
    print(error)
"""

SWARM = "mount -t tmpfs none /run/secrets && {write} && mount -o remount,ro /run/secrets"
COMPOSE = "touch /run/secrets/penstock-token && mount --bind {source} /run/secrets/penstock-token"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
@pytest.mark.parametrize(
    ("mounted", "is_read"),
    [
        (SWARM, True),
        (f"{COMPOSE} && mount -o remount,bind,ro /run/secrets/penstock-token", True),
        (f"{COMPOSE} && chown 1000 {{source}}", False),
        ("{write}", False),
    ],
    ids=["read-only tmpfs", "read-only bind mount", "writable, of another user", "no mount"],
)  # fmt: skip
def test_secrets_of_a_container_engine(tmp_path: Path, mounted: str, is_read: bool) -> None:
    source = tmp_path / "penstock-token"
    source.write_text("of-the-engine\n")
    source.chmod(0o644)
    write = "cp -p {source} /run/secrets/penstock-token"
    steps = mounted.replace("{write}", write).format(source=source)
    # On a /run of its own: nothing of this machine's is touched.
    script = f"mount -t tmpfs none /run && mkdir /run/secrets && {steps} && exec {sys.executable} -"
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        input=READ, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if "unshare" in ended.stderr or "permission denied" in ended.stderr:
        pytest.skip(f"no mounts here: {ended.stderr}")
    assert ended.stderr == ""
    if is_read:
        assert ended.stdout == "of-the-engine\n"
    else:
        assert "can be read by other users" in ended.stdout


def test_mounts_that_cannot_be_read_are_an_error_of_the_secret(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the process has no descriptors left."""
    secret.chmod(0o644)
    monkeypatch.setattr(secret_files, "_ENGINE_SECRETS", tmp_path.resolve())
    monkeypatch.setattr(secret_files, "_MOUNTS", tmp_path / "none")
    with pytest.raises(ConfigurationError, match="the token file cannot be read"):
        read_secret(secret, "the token file")
