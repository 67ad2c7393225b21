"""Aim: whatever becomes of requests and answers on the way, a store on S3 says the truth or that it does not know.

Method: a real server, and between it and the client a proxy that loses, delays and replaces answers.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore.auth
import pytest
from click.testing import CliRunner

from jobmanager.checkpoint import messages as c
from penstock.cli.main import main
from penstock.errors import Fenced, StoreNotFound, StoreTransient, Unrecoverable
from penstock.pb import checkpoint_pb2
from penstock.storage.head import HeadStore
from penstock.storage.s3 import copying
from penstock.storage.s3.listing import uploads
from penstock.storage.s3.s3_store import S3Store
from penstock.storage.s3.upload import begin
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.jobs import DEADLINE_S
from tests.support.radosgw import RadosGateway
from tests.support.s3_proxy import Fault, Request, S3Proxy
from tests.unit.jobmanager.test_checkpoint_store import files, runner, wanted

pytestmark = pytest.mark.integration


@pytest.fixture
def proxied(proxy: S3Proxy, request: pytest.FixtureRequest) -> Callable[..., S3Store]:
    """Stores whose requests go through the proxy; it has proved its conditions already."""

    def make(**others: Any) -> S3Store:
        settings = settings_of(proxy.endpoint, **others)
        store = S3Store(BUCKET, f"faults-{request.node.name}-{time.monotonic_ns()}", settings)
        store.check_writable()
        proxy.forget()
        return store

    return make


def is_a(kind: str) -> Callable[[Request], bool]:
    return lambda request: request.kind == kind


@pytest.mark.parametrize(
    "fault",
    [
        Fault(is_a("PUT"), 3, status=500),
        Fault(is_a("PUT"), 2, status=503, code="SlowDown"),
        Fault(is_a("PUT"), 2, status=409, code="OperationAborted"),
        Fault(is_a("PUT"), 2),
        Fault(is_a("PUT"), 2, forwards=True),
        Fault(is_a("GET"), 2, status=503, code="ServiceUnavailable"),
        Fault(is_a("GET"), 2),
    ],
    ids=["500", "slow down", "409", "reset", "reset after write", "get 503", "get reset"],
)
def test_what_may_help_is_tried_again(
    proxied: Callable[..., S3Store], proxy: S3Proxy, fault: Fault
) -> None:
    store = proxied()
    proxy.faults = [fault]
    store.put("a/b", [b"content"])
    assert store.get("a/b") == b"content"
    assert fault.times == 0


def test_a_server_that_hangs_is_asked_again(
    proxied: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    store = proxied(request_timeout_ms=300)
    store.put("a", [b"content"])
    hangs_s = 30
    proxy.faults = [Fault(is_a("GET"), 1, delay_s=hangs_s)]
    begun = time.monotonic()
    assert store.get("a") == b"content"
    assert time.monotonic() - begun < hangs_s


def test_a_server_that_always_fails_has_its_deadline(
    proxied: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    store = proxied(retry_timeout_ms=700)
    proxy.faults = [Fault(is_a("GET"), 10**6, status=503, code="SlowDown")]
    begun = time.monotonic()
    with pytest.raises(StoreTransient, match=r"/a cannot be read: SlowDown"):
        store.get("a")
    assert time.monotonic() - begun > 0.2
    assert 1 < proxy.kinds()["GET"] < 12, "with growing pauses"


def test_a_write_under_a_condition_is_made_once(
    proxied: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    store = proxied()
    assert store.compare_and_swap("HEAD", None, b"1")
    for fault in (
        Fault(is_a("CAS"), 1, status=500),
        Fault(is_a("CAS"), 1, status=503, code="SlowDown"),
        Fault(is_a("CAS"), 1),
    ):
        proxy.forget()
        proxy.faults = [fault]
        with pytest.raises(StoreTransient):
            store.compare_and_swap("HEAD", b"1", b"2")
        assert proxy.kinds()["CAS"] == 1
        assert store.get("HEAD") == b"1"
    proxy.faults = [Fault(is_a("CAS"), 1, forwards=True)]
    with pytest.raises(StoreTransient):
        store.compare_and_swap("HEAD", b"1", b"2")
    assert store.get("HEAD") == b"2"
    assert not store.compare_and_swap("HEAD", b"1", b"3")


def test_a_write_that_comes_late_names_nothing_that_was_removed(
    proxied: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """The client is told nothing, and finds HEAD as it was; the server makes the write all the same, some time later."""
    store = proxied(request_timeout_ms=500)
    checkpoints = runner(store)
    checkpoints.starts.prepare()
    files(store)
    late = Fault(is_a("CAS"), 1, forwards=True, delay_s=DEADLINE_S)
    proxy.faults = [late]
    checkpoints.store(wanted(1))
    late.is_over.set()
    assert late.has_come.wait(DEADLINE_S)
    head = HeadStore(store).read()
    assert head is not None
    named = {one.manifest_path for one in head.retained}
    assert store.sizes(named).keys() == named
    assert isinstance(checkpoints.store(wanted(2)), c.CheckpointStored)


def test_a_conflict_is_tried_again_for_a_while(
    proxied: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    store = proxied()
    conflict = Fault(is_a("CAS"), 2, status=409, code="ConditionalRequestConflict")
    proxy.faults = [conflict]
    assert store.compare_and_swap("HEAD", None, b"1")
    assert conflict.times == 0
    assert proxy.kinds()["CAS"] == 3
    proxy.faults = [
        Fault(is_a("CAS"), 1, status=412, code="PreconditionFailed"),
        Fault(is_a("CAS"), 1, status=404, code="NoSuchKey"),
        Fault(is_a("CAS"), 10**6, status=409, code="ConditionalRequestConflict"),
    ]
    for _ in range(2):
        assert not store.compare_and_swap("HEAD", b"1", b"2"), "it is another content"
    with pytest.raises(StoreTransient, match="others wrote it at the same time"):
        store.compare_and_swap("HEAD", b"1", b"2")
    assert proxy.kinds()["CAS"] < 30


@pytest.mark.parametrize("expected", [None, b"before"])
def test_of_many_one_wins(store: S3Store, expected: bytes | None) -> None:
    if expected is not None:
        store.put("HEAD", [expected])
    store.check_writable()
    barrier = threading.Barrier(8)

    def swap(number: int) -> str:
        barrier.wait(30)
        try:
            won = store.compare_and_swap("HEAD", expected, str(number).encode())
        except StoreTransient:
            return "unknown"  # this server answers 500 to some that come at once
        return "won" if won else "lost"

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(swap, range(8)))
    assert outcomes.count("won") <= 1
    winner = int(store.get("HEAD"))
    assert outcomes[winner] == ("won" if "won" in outcomes else "unknown")


def test_two_that_lead_with_answers_lost(proxied: Callable[..., S3Store], proxy: S3Proxy) -> None:
    store = proxied()
    old, new = HeadStore(store), HeadStore(store)
    head = old.claim("j1", 1)
    proxy.faults = [Fault(is_a("CAS"), 1, forwards=True)]
    old.swap(_named(head, 1))  # its answer was lost, and it finds out
    proxy.faults = [Fault(is_a("CAS"), 1, forwards=True, status=503, code="SlowDown")]
    with pytest.raises(StoreTransient):
        new.claim("j1", 2)
    claimed = new.claim("j1", 2)
    assert [one.checkpoint_id for one in claimed.retained] == [1]
    with pytest.raises(Fenced, match="epoch 2 has claimed it"):
        old.swap(_named(head, 2))
    proxy.faults = [Fault(is_a("CAS"), 1)]
    with pytest.raises(StoreTransient):
        new.swap(_named(claimed, 3))  # it has not happened, and that is known
    new.swap(_named(claimed, 4))
    found = HeadStore(store).read()
    assert found is not None
    assert [one.checkpoint_id for one in found.retained] == [4]


def _named(
    head: checkpoint_pb2.CheckpointHead, checkpoint_id: int
) -> checkpoint_pb2.CheckpointHead:
    named = checkpoint_pb2.CheckpointHead()
    named.CopyFrom(head)
    del named.retained[:]
    named.retained.add(checkpoint_id=checkpoint_id, manifest_path=f"chk-{checkpoint_id}/manifest")
    return named


def test_a_server_that_ignores_conditions_is_refused(proxy: S3Proxy) -> None:
    proxy.ignores_conditions = True
    store = S3Store(BUCKET, "ignores", settings_of(proxy.endpoint))
    for call in (store.check_writable, lambda: store.compare_and_swap("HEAD", None, b"1")):
        with pytest.raises(Unrecoverable, match="does not honour conditional writes"):
            call()
    assert store.list("") == []


def test_the_server_is_proved_once(proxy: S3Proxy) -> None:
    settings = settings_of(proxy.endpoint)
    for number in range(3):
        S3Store(BUCKET, f"proved-{number}", settings).compare_and_swap("HEAD", None, b"1")
    assert proxy.kinds()["CAS"] == 3 + 4


def test_wrong_credentials_and_a_missing_bucket_say_what_to_do(s3_server: RadosGateway) -> None:
    settings = settings_of(s3_server.endpoint, retry_timeout_ms=1000)
    wrong = settings_of(s3_server.endpoint, secret_key="wrong-secret")
    with pytest.raises(StoreTransient, match=r"SignatureDoesNotMatch.*s3\.secret-key") as caught:
        S3Store(BUCKET, "x", wrong).check_writable()
    assert "wrong-secret" not in str(caught.value) + repr(wrong)
    with pytest.raises(StoreTransient, match=r"NoSuchBucket.*make the bucket"):
        S3Store("no-such-bucket", "x", settings).check_writable()
    with pytest.raises(StoreTransient, match="NoSuchBucket"):
        S3Store("no-such-bucket", "x", settings).get("a")


def test_a_bucket_that_is_not_there_for_a_moment_has_lost_nothing(
    proxied: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """HeadObject says of it what it says of an object that is gone."""
    store = proxied()
    heads = HeadStore(store)
    head = heads.claim("j1", 1)
    head.retained.add(checkpoint_id=1, manifest_path="chk-1/manifest-1")
    store.put("chk-1/manifest-1", [b"one"])
    heads.swap(head)
    head.next_checkpoint_id += 1
    proxy.faults = [Fault(lambda _: True, 10**6, status=404, code="NoSuchBucket")]
    for call in (
        lambda: store.sizes(["chk-1/manifest-1"]),
        lambda: store.read("chk-1/manifest-1", 3, 0),
        lambda: store.read("chk-1/manifest-1", 0, 3),
        lambda: heads.swap(head),
        heads.verify,
        lambda: HeadStore(store).claim("j1", 2, must_exist=True),
    ):
        with pytest.raises(StoreTransient, match="NoSuchBucket"):
            call()
    proxy.faults = []
    heads.swap(head)
    assert store.sizes(["chk-1/manifest-1", "chk-1"]) == {"chk-1/manifest-1": 3}


def test_clocks_that_differ(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = dt.datetime.now(dt.UTC).replace(tzinfo=None)
    monkeypatch.setattr(
        botocore.auth,
        "get_current_datetime",
        lambda remove_tzinfo=True: now + dt.timedelta(hours=2),
    )
    with pytest.raises(StoreTransient, match=r"RequestTimeTooSkewed.*set the clock"):
        store.put("a", [b"1"])


def test_nobody_listens() -> None:
    settings = settings_of("http://127.0.0.1:9", retry_timeout_ms=400)
    with pytest.raises(StoreTransient, match=r"s3\.endpoint can be reached"):
        S3Store(BUCKET, "x", settings).get("a")


def test_whom_nobody_has_answered_yet_waits_less_and_later_as_long_as_ever(
    proxied: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    never = settings_of("http://127.0.0.1:9", retry_timeout_ms=600_000, first_answer_ms=300)
    with pytest.raises(StoreTransient, match=r"s3\.endpoint can be reached"):
        S3Store(BUCKET, "x", never).get("a")
    store = proxied(first_answer_ms=500)
    store.put("a", [b"1"])
    proxy.faults = [Fault(lambda _: True, 6)]  # for longer than that
    assert store.get("a") == b"1"


@pytest.mark.parametrize(
    "command", [["state"], ["savepoints"], ["dispose", "--force"], ["fsck"]], ids=" ".join
)
def test_a_command_with_a_wrong_address_says_so_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (tmp_path / "penstock.yaml").write_text(
        "s3.endpoint: http://127.0.0.1:9\ns3.region: us-east-1\ns3.access-key: a\ns3.secret-key: b\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.storage.object_store.FIRST_ANSWER_MS", 200)
    result = CliRunner().invoke(main, [*command, "s3://bucket/kept"])
    assert result.exit_code == 1
    assert "s3.endpoint can be reached" in result.output


def test_objects_of_parts(proxied: Callable[..., S3Store], proxy: S3Proxy) -> None:
    store = proxied(upload_bytes_max=5 << 20)
    part = bytes(range(256)) * 4096
    content = part * 12
    proxy.faults = [
        Fault(lambda request: "partNumber=2" in request.path, 1, forwards=True),
        Fault(lambda r: r.method == "POST" and "uploadId" in r.path, 1, forwards=True, status=500),
    ]
    sizes: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: sizes.append(store.put(f"p{n}", [part] * 12)))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [len(content)] * 3
    assert all(fault.times == 0 for fault in proxy.faults)
    for number in range(3):
        assert store.read(f"p{number}", 0, len(content)) == content
    assert store.temporaries() == ()
    copying.copy_in_parts(
        store._requests, store._key("p0"), store._requests, store._key("q"), 5 << 20
    )
    assert store.read("q", 5, len(content) - 5) == content[5:]
    too_large = Fault(
        lambda r: r.kind == "PUT" and "/r/p1" in r.path, status=400, code="InvalidRequest"
    )
    proxy.faults = [too_large]
    proxy.forget()
    store.copy_from(store, {"p1": "r/p1", "p2": "r/p2"})
    assert too_large.times == 0
    assert proxy.kinds() == {"PUT": 2, "HEAD": 1, "PART": 3}, (
        "what one request copies is not looked at"
    )
    assert store.get("r/p1") == content
    assert store.get("r/p2") == content
    with pytest.raises(StoreNotFound, match="gone does not exist"):
        store.copy_from(store, {"gone": "x"})


def test_uploads_that_nobody_ended_are_swept(store: S3Store) -> None:
    store.put("kept", [b"1"])
    begin(store._requests, store._key("shared/a"))
    [left] = store.temporaries()
    assert left.path.startswith("shared/a/.upload-")
    assert store.list("shared/") == []
    assert store.sweep_temporaries() == (), "its writer may live"
    assert store.sweep_temporaries(0) == (left.path,)
    assert store.temporaries() == ()

    def broken() -> Any:
        yield bytes(6 << 20)
        raise RuntimeError("source")

    with pytest.raises(RuntimeError, match="source"):
        store.put("shared/b", broken())
    assert list(uploads(store._requests, store._prefix)) == []
    assert [info.path for info in store.list("")] == ["kept"]


def test_the_server_is_killed_and_comes_back(s3_server: RadosGateway) -> None:
    settings = settings_of(s3_server.endpoint, retry_timeout_ms=int(DEADLINE_S * 1000))
    store = S3Store(BUCKET, "comes-back", settings)
    store.put("a", [b"1"])
    s3_server.kill()
    answers: list[bytes] = []
    reader = threading.Thread(target=lambda: answers.append(store.get("a")))
    reader.start()
    s3_server.start_gateway()
    reader.join()
    assert answers == [b"1"]
