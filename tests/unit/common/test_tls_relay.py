"""Aim: a relay carries bytes as they are between hosts that believe each other, and lets nobody else through, with why.

Method: two relays as two TaskManagers have them, real sockets, and certificates of a real library that are good or wrong
in one way each. What is logged on one side and what the other side is told are both read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog
import trustme
from typing_extensions import override

from common.tls.doors import (
    Destination,
    Entrance,
    Exit,
    Visitor,
    destination_of,
    request_line,
)
from common.tls.relay_runner import RelayRunner
from common.tls.tls_files_store import TlsFiles, TlsPaths
from penstock.errors import ConfigurationError
from tests.support.certificates import (
    CertificateFiles,
    certificate_files,
    expired,
    not_yet_valid,
)
from tests.support.servers import require

DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA(organization_name="ours")


@pytest.fixture(scope="module")
def other_ca() -> trustme.CA:
    return trustme.CA(organization_name="theirs")


@dataclass
class Told:
    """What relays have logged."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, _logger: object, _method: str, event: Any) -> Any:
        with self.changed:
            self.lines.append(dict(event))
            self.changed.notify_all()
        raise structlog.DropEvent

    def until(self, event: str, text: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            return next(
                (
                    line
                    for line in self.lines
                    if line["event"] == event and text in str(line.get("reason", ""))
                ),
                None,
            )

        with self.changed:
            assert self.changed.wait_for(lambda: found() is not None, DEADLINE_S), self.lines
            line = found()
        assert line is not None
        return line


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    before = structlog.get_config()
    structlog.configure(processors=[told], cache_logger_on_first_use=False)
    try:
        yield told
    finally:
        structlog.configure(**before)


class TwoHosts:
    """A relay that is left, one that is entered, and a process behind it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._closing: list[Callable[[], None]] = []

    def start(self, ours: TlsFiles, theirs: TlsFiles) -> None:
        self.near, self.far = RelayRunner(ours, 64 * 1024), RelayRunner(theirs, 64 * 1024)
        for relay in (self.near, self.far):
            relay.start()
            self._closing.append(relay.close)
        self.behind = self.unix("behind.sock")
        self._closing.append(self.behind.close)
        tcp = socket.create_server(("127.0.0.1", 0))
        self.port: int = tcp.getsockname()[1]
        self.far.let_in(
            tcp,
            Entrance(
                lambda visitor: str(self._directory / visitor.name),
                requires_certificate=True,
                reads_name=True,
            ),
        )
        way = Exit(apology=lambda reason: f"sorry: {reason}".encode())
        self.near.let_out(self.unix("out.sock"), way)

    def unix(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._directory / name))
        listener.listen()
        listener.settimeout(DEADLINE_S)
        return listener

    def connect(self, name: str = "behind.sock", host: str = "127.0.0.1") -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(DEADLINE_S)
        sock.connect(str(self._directory / "out.sock"))
        sock.sendall(request_line(Destination(host, self.port, name)))
        return sock

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection through the relays."""
        one = self.connect()
        other, _ = self.behind.accept()
        other.settimeout(DEADLINE_S)
        return one, other

    def close(self) -> None:
        for close in reversed(self._closing):
            close()


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with tempfile.TemporaryDirectory(prefix="ps") as directory:  # paths of sockets must be short
        hosts = TwoHosts(Path(directory))
        try:
            yield hosts
        finally:
            hosts.close()


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("size", [0, 1, 16 * 1024, 64 * 1024 + 1, 9_000_000])
def test_bytes_arrive_as_they_are_in_both_directions_and_the_end_behind_them(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, size: int
) -> None:
    files = certificate_files(tmp_path, ca).files
    hosts.start(files(), files())
    one, other = hosts.pair()
    data = os.urandom(size)
    with one, other:
        writing = threading.Thread(target=lambda: other.sendall(data))
        writing.start()
        received = b""
        while len(received) < size:
            received += one.recv(1 << 20)
        writing.join()
        assert hashlib.sha256(received).digest() == hashlib.sha256(data).digest()

        def write_and_leave() -> None:
            one.sendall(data)
            one.close()

        writing = threading.Thread(target=write_and_leave)
        writing.start()
        assert read_all(other) == data
        writing.join()


def test_who_leaves_has_what_he_sent_delivered_though_the_other_keeps_talking(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA
) -> None:
    files = certificate_files(tmp_path, ca).files
    hosts.start(files(), files())
    one, other = hosts.pair()
    with other:
        is_over = threading.Event()

        def talk() -> None:
            try:
                while not is_over.is_set():
                    other.sendall(b"?" * 1000)
            except OSError:
                pass

        talking = threading.Thread(target=talk)
        talking.start()
        data = os.urandom(3_000_000)
        one.sendall(data)
        one.close()
        assert read_all(other) == data
        is_over.set()
        talking.join()


def test_a_side_that_takes_nothing_holds_the_other_up_and_nobody_else(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA
) -> None:
    files = certificate_files(tmp_path, ca).files
    hosts.start(files(), files())
    one, other = hosts.pair()
    with one, other:
        one.setblocking(False)
        sent = 0
        part = b"x" * (1 << 20)
        while sent < 256 << 20:
            try:
                sent += one.send(part)
            except BlockingIOError:
                break
        # Kernel buffers on the way and one buffer of each relay, not all that somebody sends.
        assert sent < 64 << 20
        again, beside = hosts.pair()
        with again, beside:
            again.sendall(b"still here")
            assert beside.recv(100) == b"still here"
        one.settimeout(DEADLINE_S)
        one.close()
        assert len(read_all(other)) == sent


def test_a_request_line_comes_back_as_it_was() -> None:
    for wanted in (Destination("tm-2", 7000, "3.sock"), Destination("::1", 1, "x")):
        assert destination_of(request_line(wanted)[:-1]) == wanted


def test_who_asks_for_what_is_not_there_is_told(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, told: Told
) -> None:
    files = certificate_files(tmp_path, ca).files
    hosts.start(files(), files())
    with hosts.connect("nobody.sock") as sock:
        assert b"it let nobody through" in read_all(sock)
    assert told.until("tls.turned_away", "nobody.sock does not listen here")
    with hosts.connect(host="nobody.invalid") as sock:
        assert b"nobody.invalid is unknown" in read_all(sock)
    told.until("tls.refused", "nobody.invalid is unknown")


def test_who_does_not_say_what_he_wants_is_told(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, told: Told
) -> None:
    files = certificate_files(tmp_path, ca).files
    hosts.start(files(), files())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(str(hosts._directory / "out.sock"))
        sock.sendall(b"x" * 2000)
        assert b"does not say what it wants" in sock.recv(1000)


@pytest.mark.parametrize("line", [b"tm-2 1\x30000000000000000000 x", b" 1 x", b"tm\x00 1 x"])
def test_who_wants_to_go_where_nobody_can_be_takes_nobody_along(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, told: Told, line: bytes
) -> None:
    files = certificate_files(tmp_path, ca).files
    hosts.start(files(), files())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(str(hosts._directory / "out.sock"))
        sock.sendall(line + b"\n")
        assert b"sorry" in read_all(sock)
    one, other = hosts.pair()
    with one, other:
        one.sendall(b"x")
        assert other.recv(1) == b"x"


# ---------------------------------------------------------------- what nobody thought of


def test_a_connection_that_fails_in_its_own_way_is_ended_alone_and_told_of(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, told: Told
) -> None:
    files = certificate_files(tmp_path, ca).files
    hosts.start(files(), files())

    def backend(visitor: Visitor) -> str:
        raise RuntimeError(f"no thread for {visitor.name}")

    tcp = socket.create_server(("127.0.0.1", 0))
    entered, hosts.port = hosts.port, tcp.getsockname()[1]
    hosts.far.let_in(tcp, Entrance(backend, requires_certificate=True, reads_name=True))
    with hosts.connect() as sock:
        assert b"sorry" in read_all(sock)
    told.until("tls.connection_crashed", "")
    hosts.port = entered
    one, other = hosts.pair()
    with one, other:
        one.sendall(b"x")
        assert other.recv(1) == b"x"


class Unlucky(socket.socket):
    """The first one who comes has failed before he is taken, as ``accept`` says of the network's errors."""

    failed = False

    @override
    def accept(self) -> tuple[socket.socket, Any]:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        return super().accept()


def test_who_fails_before_he_is_taken_takes_nobody_along(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA
) -> None:
    files = certificate_files(tmp_path, ca).files
    hosts.start(files(), files())
    tcp = Unlucky(socket.AF_INET, socket.SOCK_STREAM)
    tcp.bind(("127.0.0.1", 0))
    tcp.listen()
    hosts.port = tcp.getsockname()[1]
    path = str(hosts._directory / "behind.sock")
    entrance = Entrance(lambda _visitor: path, requires_certificate=True, reads_name=True)
    hosts.far.let_in(tcp, entrance)
    one, other = hosts.pair()
    with one, other:
        one.sendall(b"x")
        assert other.recv(1) == b"x"


_DEAF_DAEMON = """
import sys, threading
from pathlib import Path
from common.tls.relay_runner import RelayRunner
from common.tls.tls_files_store import TlsFiles, TlsPaths
relay = RelayRunner(TlsFiles(TlsPaths(*map(Path, sys.argv[1:])), verify_hostname=True), 64 * 1024)
relay.start()
relay.submit(lambda: [][0])
threading.Event().wait()
"""


def test_a_daemon_whose_relay_cannot_go_on_ends_and_says_why(
    tmp_path: Path, ca: trustme.CA
) -> None:
    files = certificate_files(tmp_path, ca)
    daemon = subprocess.run(
        [sys.executable, "-c", _DEAF_DAEMON, files.cert, files.key, files.ca],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert daemon.returncode == 1
    assert "tls.relay_crashed" in daemon.stdout
    assert "list index out of range" in daemon.stdout


# ---------------------------------------------------------------- certificates


@dataclass(frozen=True)
class Wrong:
    """A certificate that must not do, and what both sides say of it.

    Attributes:
        entered: said by the one who is connected to, of the one who connects with it.
        left: said by the one who connects, of the one who has it.
    """

    options: Callable[[], dict[str, object]]
    entered: str
    left: str
    told_of_own: str
    is_of_other_ca: bool = False


WRONG = {
    "other CA": Wrong(dict, "not of a CA in", "not of a CA in", "does not know the CA", True),
    "expired": Wrong(expired, "has expired", "has expired", "a certificate that has expired"),
    "not yet valid": Wrong(
        not_yet_valid, "not valid yet", "not valid yet", "refuses the certificate"
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_who_connects_with_a_wrong_certificate_is_refused_with_a_word_on_both_sides(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, other_ca: trustme.CA, told: Told, kind: str
) -> None:
    wrong = WRONG[kind]
    issuer = other_ca if wrong.is_of_other_ca else ca
    ours = certificate_files(tmp_path / "ours", issuer, [ca], **wrong.options())
    hosts.start(ours.files(), certificate_files(tmp_path / "theirs", ca).files())
    with hosts.connect() as sock:
        assert wrong.told_of_own in read_all(sock).decode()
    told.until("tls.turned_away", wrong.entered)
    told.until("tls.refused", wrong.told_of_own)


@pytest.mark.parametrize("kind", WRONG)
def test_who_is_reached_with_a_wrong_certificate_is_refused_with_a_word_on_both_sides(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, other_ca: trustme.CA, told: Told, kind: str
) -> None:
    wrong = WRONG[kind]
    issuer = other_ca if wrong.is_of_other_ca else ca
    theirs = certificate_files(tmp_path / "theirs", issuer, [ca], **wrong.options())
    hosts.start(certificate_files(tmp_path / "ours", ca).files(), theirs.files())
    with hosts.connect() as sock:
        assert wrong.left in read_all(sock).decode()
    told.until("tls.refused", wrong.left)
    told.until("tls.turned_away", wrong.told_of_own)


def test_names_are_checked_unless_they_are_not_to_be(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, told: Told
) -> None:
    ours = certificate_files(tmp_path / "ours", ca)
    theirs = certificate_files(tmp_path / "theirs", ca, names=("elsewhere.example",))
    hosts.start(ours.files(), theirs.files())
    with hosts.connect() as sock:
        assert b"its certificate is not for 127.0.0.1" in read_all(sock)
    told.until("tls.refused", "its certificate is not for 127.0.0.1")
    with hosts.connect(host="localhost") as sock:
        assert b"its certificate is not for localhost" in read_all(sock)


def test_any_certificate_of_the_ca_will_do_where_names_are_not_checked(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA
) -> None:
    ours = certificate_files(tmp_path / "ours", ca)
    theirs = certificate_files(tmp_path / "theirs", ca, names=("elsewhere.example",))
    hosts.start(ours.files(verify_hostname=False), theirs.files())
    one, other = hosts.pair()
    with one, other:
        one.sendall(b"hello")
        assert other.recv(100) == b"hello"


def test_who_shows_no_certificate_or_speaks_no_tls_is_turned_away(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, told: Told
) -> None:
    files = certificate_files(tmp_path, ca)
    hosts.start(files.files(), files.files())
    context = ssl.create_default_context(cafile=str(files.ca))
    with (
        socket.create_connection(("127.0.0.1", hosts.port), DEADLINE_S) as sock,
        context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        wrapped.recv(10)
    told.until("tls.turned_away", "it has shown no certificate")
    with socket.create_connection(("127.0.0.1", hosts.port), DEADLINE_S) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert read_all(sock) == b""
    told.until("tls.turned_away", "it speaks no TLS")


def test_who_is_reached_and_speaks_no_tls_is_called_so(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, told: Told
) -> None:
    files = certificate_files(tmp_path, ca)
    hosts.start(files.files(), files.files())
    with socket.create_server(("127.0.0.1", 0)) as plain:
        hosts.port = plain.getsockname()[1]
        with hosts.connect() as sock:
            accepted, _ = plain.accept()
            with accepted:
                accepted.sendall(b"hello, who is there?")
                assert b"it speaks no TLS" in read_all(sock)
    told.until("tls.refused", "it speaks no TLS")


def test_who_leaves_before_it_can_be_told_takes_nobody_along(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, told: Told
) -> None:
    files = certificate_files(tmp_path, ca)
    hosts.start(files.files(), files.files())
    entered = hosts.port
    with socket.create_server(("127.0.0.1", 0)) as plain:
        hosts.port = plain.getsockname()[1]
        left = hosts.connect()
        accepted, _ = plain.accept()
        left.close()
        accepted.close()
        told.until("tls.refused", "during the handshake")
    hosts.port = entered
    one, other = hosts.pair()
    with one, other:
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_who_only_looks_whether_there_is_a_port_is_not_talked_about(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, told: Told
) -> None:
    files = certificate_files(tmp_path, ca)
    hosts.start(files.files(), files.files())
    socket.create_connection(("127.0.0.1", hosts.port), DEADLINE_S).close()
    one, other = hosts.pair()
    with one, other:
        one.sendall(b"x")
        assert other.recv(1) == b"x"
        assert (
            told.lines == []
        )  # of the pair there is something to tell: `other` leaves without a word


# ---------------------------------------------------------------- files


def test_a_ca_is_exchanged_step_by_step_and_connections_stay(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, other_ca: trustme.CA, told: Told
) -> None:
    ours = certificate_files(tmp_path / "ours", ca)
    theirs = certificate_files(tmp_path / "theirs", ca)
    hosts.start(ours.files(), theirs.files())
    first = hosts.pair()
    pairs = [first]
    for files in (ours, theirs):
        files.trust([ca, other_ca])
        pairs.append(hosts.pair())
    for files in (theirs, ours):
        files.write(other_ca, [ca, other_ca])
        pairs.append(hosts.pair())
    for files in (ours, theirs):
        files.trust([other_ca])
        pairs.append(hosts.pair())
    for one, other in pairs:
        one.sendall(b"x")
        assert other.recv(10) == b"x"
        one.close()
        other.close()
    ours.write(ca, [other_ca])
    with hosts.connect() as sock:
        assert b"does not know the CA" in read_all(sock)


def test_files_that_cannot_be_used_leave_those_before_in_force(
    hosts: TwoHosts, tmp_path: Path, ca: trustme.CA, told: Told
) -> None:
    ours = certificate_files(tmp_path / "ours", ca)
    hosts.start(ours.files(), certificate_files(tmp_path / "theirs", ca).files())
    ours.cert.write_bytes(ours.cert.read_bytes()[:100])
    one, other = hosts.pair()
    one.close()
    other.close()
    line = told.until("tls.files_unusable", str(ours.cert))
    assert "what was read before is used" in line["reason"]
    ours.write(ca, [ca])
    one, other = hosts.pair()
    one.close()
    other.close()
    told.until("tls.files_read", "")


@pytest.mark.parametrize("kind", WRONG)
def test_a_daemon_says_at_once_that_nobody_will_believe_its_own_certificate(
    tmp_path: Path, ca: trustme.CA, other_ca: trustme.CA, told: Told, kind: str
) -> None:
    wrong = WRONG[kind]
    issuer = other_ca if wrong.is_of_other_ca else ca
    own = certificate_files(tmp_path, issuer, [ca], **wrong.options())
    files = own.files()
    line = told.until("tls.own_certificate_refused", wrong.left)
    assert str(own.cert) in line["reason"]
    told.lines.clear()
    own.write(ca, [ca])
    files.client_context()
    assert [line["event"] for line in told.lines] == ["tls.files_read"]


def spoil(files: CertificateFiles, name: str) -> None:
    match name:
        case "no certificate":
            files.cert.unlink()
        case "no key":
            files.key.unlink()
        case "no CA":
            files.ca.unlink()
        case "a CA that is none":
            files.ca.write_text("nothing")
        case "a certificate that is none":
            files.cert.write_text("nothing")
        case "a key for everybody":
            files.key.chmod(0o644)
        case "another's key":
            files.key.write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())
        case _:
            raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        (
            "no certificate",
            r"cert\.pem \(security\.ssl\.internal\.cert\) cannot be read: No such file",
        ),
        ("no key", "security.ssl.internal.key"),
        ("no CA", "security.ssl.internal.ca"),
        ("a CA that is none", "security.ssl.internal.ca"),
        ("a certificate that is none", "security.ssl.internal.cert"),
        ("a key for everybody", "can be read by other users"),
        ("another's key", "another certificate's"),
    ],
)
def test_files_that_cannot_be_used_are_refused_at_the_start(
    tmp_path: Path, ca: trustme.CA, name: str, word: str
) -> None:
    files = certificate_files(tmp_path, ca)
    spoil(files, name)
    with pytest.raises(ConfigurationError, match=word):
        TlsFiles(TlsPaths(files.cert, files.key, files.ca), verify_hostname=True)


def test_the_commands_of_the_documentation_make_files_that_work(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    require("openssl")
    text = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    commands = next(block for block in text.split("```") if "openssl req -x509" in block)
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True, capture_output=True)
    one, other = (
        TlsFiles(
            TlsPaths(tmp_path / f"{host}.pem", tmp_path / f"{host}.key", tmp_path / "ca.pem"),
            verify_hostname=True,
        )
        for host in ("taskmanager-1", "taskmanager-2")
    )
    hosts.start(one, other)
    near, far = hosts.pair()
    with near, far:
        near.sendall(b"hello")
        assert far.recv(100) == b"hello"
