"""Aim: who is proposed, who ends when, and what a standby says; ZooKeeper itself is in tests/integration/high_availability."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.client import KazooState
from kazoo.exceptions import ConnectionLoss, KazooException, NoAuthError, QuotaExceededError
from structlog.testing import capture_logs

from common.clock import SystemClock
from common.grpc_server import make_server
from jobmanager.leadership import leadership_runner, zookeeper_runner
from jobmanager.leadership.election import (
    Connected,
    Elected,
    LeaderNode,
    LeaderTold,
    SessionLost,
    Suspended,
    before,
    decode_leader,
    encode_leader,
    reason_to_end,
)
from jobmanager.leadership.leadership_runner import LeadershipRunner
from jobmanager.leadership.standby_runner import StandbyRunner
from jobmanager.stores.leader_store import LeaderStore
from penstock.client.grpc_errors import error_from_rpc
from penstock.config import Configuration
from penstock.errors import ConfigurationError, Fenced, NotLeader, StoreNotFound, StoreTransient
from penstock.pb import client_pb2, client_pb2_grpc
from penstock.storage.memory_store import MemoryStore
from penstock.storage.swapped_object import NewerLeader
from tests.support.jobs import DEADLINE_S

LEADER = LeaderNode("host:6123", 7, "abc-0000000003")
OUTAGE_S = 600


@given(st.lists(st.integers(0, 9_999), unique=True, min_size=1), st.data())
def test_each_candidate_waits_for_the_one_before_it(numbers: list[int], data: Any) -> None:
    nodes = [f"{99_999 - number:x}-{number:010d}" for number in numbers]
    own = data.draw(st.sampled_from(nodes))
    rival = before(own, nodes)
    smaller = [node for node in nodes if node.rpartition("-")[2] < own.rpartition("-")[2]]
    assert rival == (max(smaller, key=lambda node: node.rpartition("-")[2]) if smaller else "")
    assert before(own, [node for node in nodes if node != own]) is None


def test_a_leader_is_read_as_it_was_written_and_nonsense_is_nobody() -> None:
    assert decode_leader(encode_leader(LEADER)) == LEADER
    for content in (b"", b"{}", b"\xff", b"[]", b'{"address": 1}', b'"text"'):
        assert decode_leader(content) is None


@pytest.mark.parametrize("is_leading", [False, True])
@pytest.mark.parametrize("tolerates", [False, True])
def test_only_what_proves_something_ends_a_process(is_leading: bool, tolerates: bool) -> None:
    def ends(event: Any) -> bool:
        return bool(reason_to_end(event, is_leading=is_leading, tolerates_suspension=tolerates))

    assert ends(SessionLost())
    assert ends(Suspended()) == (is_leading and not tolerates)
    assert not any(map(ends, (Elected(), Connected(), LeaderTold(LEADER), LeaderTold(None))))


@pytest.mark.parametrize("leader", [None, LEADER])
def test_a_standby_refuses_every_kind_of_call_and_tells_who_leads(
    leader: LeaderNode | None,
) -> None:
    async def scenario() -> None:
        standby = StandbyRunner("standby:1")
        standby.leader = leader
        server = make_server("0123456789")
        port = server.add_insecure_port("127.0.0.1:0")
        standby.answer_on(server)
        await server.start()
        metadata = (("authorization", "Bearer 0123456789"),)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = client_pb2_grpc.JobManagerStub(channel)
            calls = [
                stub.ListJobs(client_pb2.ListJobsRequest(), metadata=metadata),
                stub.WatchJob(client_pb2.WatchJobRequest(), metadata=metadata).read(),
                stub.UploadArtifact(iter([client_pb2.ArtifactChunk()]), metadata=metadata),
            ]
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                error = error_from_rpc(refused.value)
                assert isinstance(error, NotLeader)
                assert error.leader == ("host:6123" if leader else "")
                assert "is a standby" in str(error)
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await stub.ListJobs(client_pb2.ListJobsRequest())
            assert unknown.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await server.stop(None)
        assert standby.status.startswith("standby; ")
        assert bool(standby.why_not_serving) == (leader is None)

    asyncio.run(scenario())


class Refusing:
    """A client of ZooKeeper whose nodes are somebody else's at first."""

    connected = True
    watches: ClassVar[list[str]] = []
    refusal: ClassVar[type[KazooException]] = NoAuthError

    def __init__(self, **_: Any) -> None:
        self.refusals = self.refused_joins = self.refused_words = 3
        self.said = b""
        self.watches.clear()
        self._listeners: list[Any] = []

    def add_listener(self, listener: Any) -> None:
        self._listeners.append(listener)

    def start_async(self) -> None:
        for listener in self._listeners:
            listener(KazooState.CONNECTED)

    def get(self, path: str) -> tuple[bytes, None]:
        if self.refusals:
            self.refusals -= 1
            raise NoAuthError
        return encode_leader(LEADER), None

    def DataWatch(self, path: str, tell: Any) -> None:  # noqa: N802 - kazoo's
        self.watches.append(path)  # first it listens for the session, for ever, and then it reads
        tell(*self.get(path))

    def retry(self, call: Any, *arguments: Any) -> Any:
        return call(*arguments)

    def ensure_path(self, path: str) -> None:
        pass

    def set(self, path: str, content: bytes) -> None:
        if self.refused_words:
            self.refused_words -= 1
            raise self.refusal
        self.said = content

    def get_children(self, path: str) -> list[str]:
        return ["own-0000000001"]

    def create(self, path: str, *_: Any, **__: Any) -> str:
        if self.refused_joins:
            self.refused_joins -= 1
            raise NoAuthError
        return f"{path.rpartition('/')[0]}/own-0000000001"

    def delete(self, path: str) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_who_may_not_touch_the_nodes_of_an_election_says_so_and_takes_part_once_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with credentials that are not those of the other JobManagers, until somebody gives it theirs."""
    monkeypatch.setattr(zookeeper_runner, "KazooClient", Refusing)
    monkeypatch.setattr(zookeeper_runner, "_REFUSED_PAUSE_S", 0.01)

    async def scenario() -> None:
        elected = asyncio.Event()

        def hear(event: Any) -> None:
            if event == Elected():
                elected.set()

        config = Configuration.from_mapping({"high-availability.zookeeper.quorum": "h:1"})
        candidate = zookeeper_runner.ZookeeperRunner(config, "host:1", hear)
        with capture_logs() as logs:
            candidate.start()
            async with asyncio.timeout(DEADLINE_S):
                await elected.wait()
        await candidate.stop()
        assert len(Refusing.watches) == 1, "each would go on for as long as this runs"
        refused, admitted = [one for one in logs if one["log_level"] != "debug"]
        assert (refused["event"], refused["log_level"]) == ("election.refused", "error")
        assert "NoAuthError" in refused["reason"]
        assert "credentials-file" in refused["reason"]
        assert admitted["event"] == "election.admitted"

    asyncio.run(scenario())


@pytest.mark.parametrize("refusal", [NoAuthError, QuotaExceededError])
def test_a_leader_that_may_not_say_so_leads_on_and_says_it_once_it_may(
    monkeypatch: pytest.MonkeyPatch, refusal: type[KazooException]
) -> None:
    """A refusal ended its process, and that of everybody who was elected next."""
    monkeypatch.setattr(Refusing, "refusal", refusal)
    monkeypatch.setattr(zookeeper_runner, "KazooClient", Refusing)
    monkeypatch.setattr(zookeeper_runner, "_REFUSED_PAUSE_S", 0.01)

    async def scenario() -> None:
        config = Configuration.from_mapping({"high-availability.zookeeper.quorum": "h:1"})
        leader = zookeeper_runner.ZookeeperRunner(config, "host:1", lambda _: None)
        with capture_logs() as logs:
            async with asyncio.timeout(DEADLINE_S):
                await leader.say(7)
        told = decode_leader(leader._client.said)
        await leader.stop()
        assert told is not None
        assert (told.address, told.epoch) == ("host:1", 7)
        refused, admitted = [one for one in logs if one["log_level"] != "debug"]
        assert "nobody is told that this JobManager leads" in refused["reason"]
        assert refusal.__name__ in refused["reason"]
        assert ("credentials" in refused["reason"]) is (refusal is NoAuthError)
        assert admitted["event"] == "election.admitted"

    asyncio.run(scenario())


def test_a_standby_sees_no_leader_in_one_whose_port_is_refused_or_that_it_was_itself() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address = f"127.0.0.1:{listening.getsockname()[1]}"
            standby, dead = StandbyRunner("own:1"), asyncio.Event()
            standby.leader = LeaderNode(address, 7, "abc-0000000003")
            assert (standby.why_not_serving, standby.status) == ("", f"standby; {address} leads")

        async def is_dead(_: LeaderNode) -> None:
            dead.set()

        watching = asyncio.ensure_future(standby.watch_leader(is_dead, lambda _: None))
        await asyncio.wait_for(dead.wait(), DEADLINE_S)
        told = f"standby; no JobManager is known to lead; {address} led last, and is gone"
        assert standby.why_not_serving == standby.status == told
        standby.leader = replace(LEADER, address="own:1")
        assert "no JobManager is known to lead" in standby.why_not_serving
        standby.leader = LEADER
        assert standby.why_not_serving == ""
        watching.cancel()

    asyncio.run(scenario())


class EndedError(Exception):
    """The process has ended."""


def test_who_meets_a_newer_leader_ends_and_the_next_epoch_is_above_it() -> None:
    """Also where LEADER does not know of it: it was lost, or comes from a backup."""

    def end(reason: str) -> NoReturn:
        raise EndedError(reason)

    async def scenario() -> None:
        kept = MemoryStore(1 << 20)
        store = LeaderStore(kept, "kept")
        config = Configuration.from_mapping({"high-availability.zookeeper.quorum": "127.0.0.1:1"})
        LeadershipRunner(config, "own:1", store, end, SystemClock())
        store.take_over()
        with pytest.raises(EndedError, match="epoch 41 has it"):
            store.met(NewerLeader("epoch 41 has it", 41))
        after = LeaderStore(kept, "kept")
        after.take_over()
        assert after.epoch == 43
        with pytest.raises((EndedError, Fenced)):
            store.verify()

    asyncio.run(scenario())


def test_while_a_deposed_leader_ends_nobody_is_answered() -> None:
    """Storage that is slow just then makes its end take long; what another thread would say is as wrong as the rest."""
    ends, may_end = threading.Event(), threading.Event()

    def end(reason: str) -> NoReturn:
        ends.set()
        may_end.wait(DEADLINE_S)
        raise EndedError(reason)

    kept = MemoryStore(1 << 20)
    store = LeaderStore(kept, "kept")
    config = Configuration.from_mapping({"high-availability.zookeeper.quorum": "127.0.0.1:1"})

    async def made() -> None:
        LeadershipRunner(config, "own:1", store, end, SystemClock())

    asyncio.run(made())
    store.take_over()
    LeaderStore(kept, "kept").take_over()

    def look() -> None:
        with pytest.raises((EndedError, Fenced)):
            store.verify()

    first, other = threading.Thread(target=look), threading.Thread(target=look)
    first.start()
    assert ends.wait(DEADLINE_S)
    other.start()
    other.join(0.1)
    assert other.is_alive()
    may_end.set()
    for thread in (first, other):
        thread.join(DEADLINE_S)


def test_a_storage_that_takes_no_leader_is_told_of_once_and_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        store = LeaderStore(MemoryStore(1 << 20), "kept")
        config = Configuration.from_mapping({"high-availability.zookeeper.quorum": "127.0.0.1:1"})
        runner = LeadershipRunner(config, "own:1", store, pytest.fail, SystemClock())
        answers = [StoreTransient("the disk is full")] * 3
        take_over = store.take_over

        said = []

        def refusing(epoch_min: int) -> None:
            said.append(runner.standby.why_not_serving)
            if answers:
                raise answers.pop()
            take_over(epoch_min)

        monkeypatch.setattr(store, "take_over", refusing)
        monkeypatch.setattr(leadership_runner, "_PAUSE_S", 0.0)
        with capture_logs() as logs:
            await runner._take_over()
        nobody = "standby; no JobManager is known to lead"
        lacks = f"{nobody}; this one was elected, and cannot lead: the disk is full"
        assert said == [nobody, lacks, lacks, lacks], "clients and /health are told what it lacks"
        told = [(one["event"], one["log_level"]) for one in logs if one["log_level"] != "debug"]
        assert told == [
            ("leader.not_written", "error"),
            ("leader.written_again", "info"),
            ("leader.elected", "info"),
        ]

    asyncio.run(scenario())


def test_a_storage_that_hangs_is_told_of_and_what_comes_late_takes_nothing_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        store = LeaderStore(MemoryStore(1 << 20), "kept")
        config = Configuration.from_mapping({"high-availability.zookeeper.quorum": "127.0.0.1:1"})
        monkeypatch.setattr(leadership_runner, "_CALL_TIMEOUT_MS", 20)
        monkeypatch.setattr(leadership_runner, "_PAUSE_S", 0.0)
        runner = LeadershipRunner(config, "own:1", store, pytest.fail, SystemClock())
        take_over, goes_on, epochs = store.take_over, threading.Event(), []

        def hanging(epoch_min: int) -> None:
            assert goes_on.wait(DEADLINE_S)
            take_over(epoch_min)
            epochs.append(store.epoch)

        monkeypatch.setattr(store, "take_over", hanging)
        with capture_logs() as logs:
            async with asyncio.TaskGroup() as tasks:
                leads = tasks.create_task(runner._take_over())
                while runner._calls.given_up < 3:  # noqa: ASYNC110 - threads count it
                    await asyncio.sleep(0.01)
                assert not leads.done()
                goes_on.set()
        await runner._calls.wait_for_all(1000 * int(DEADLINE_S))
        store.verify()
        assert store.epoch == runner.numbers.epoch == epochs[-1]
        told = [one for one in logs if one["event"] == "leader.not_written"]
        assert "has not answered" in told[0]["reason"]

    asyncio.run(scenario())


def test_a_leader_looks_at_its_name_in_the_storage_while_nobody_hears_that_it_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZooKeeper may be away for long; who has taken over meanwhile was not noticed."""

    def end(reason: str) -> NoReturn:
        raise EndedError(reason)

    async def scenario() -> None:
        kept = MemoryStore(1 << 20)
        store = LeaderStore(kept, "kept")
        settings = {
            "high-availability.zookeeper.quorum": "127.0.0.1:1",
            "heartbeat.interval": "10ms",
        }
        config = Configuration.from_mapping(settings)
        runner = LeadershipRunner(config, "own:1", store, end, SystemClock())

        async def never(_epoch: int) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(runner._election, "say", never)
        await runner._take_over()
        LeaderStore(kept, "kept").take_over()
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(DEADLINE_S):
                await runner.keep()
        assert caught.group_contains(EndedError, match="epoch 2 leads")

    asyncio.run(scenario())


def test_ten_minutes_without_zookeeper_end_nothing_and_the_end_of_the_session_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In simulated time: the leader looks at its name all the while."""
    slept: list[float] = []
    is_back = asyncio.Event()
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) >= OUTAGE_S:
            is_back.set()
        await real_sleep(0)

    def end(reason: str) -> NoReturn:
        raise EndedError(reason)

    async def scenario() -> None:
        store = LeaderStore(MemoryStore(1 << 20), "kept")
        settings = {
            "high-availability.zookeeper.quorum": "127.0.0.1:1",
            "heartbeat.interval": "1s",
        }
        runner = LeadershipRunner(
            Configuration.from_mapping(settings), "own:1", store, end, SystemClock()
        )
        looks, verify = [], store.verify
        monkeypatch.setattr(store, "verify", lambda: looks.append(verify()))
        monkeypatch.setattr(runner._election, "say", lambda _epoch: asyncio.Event().wait())
        await runner._take_over()
        runner.is_leading = True
        monkeypatch.setattr(leadership_runner.asyncio, "sleep", sleep)
        runner._heard(Suspended())
        keeping = asyncio.ensure_future(runner.keep())
        await is_back.wait()
        assert (len(looks), store.epoch) == (pytest.approx(OUTAGE_S, abs=1), 1)
        assert not keeping.done()
        runner._heard(Connected())
        with pytest.raises(EndedError):
            runner._heard(SessionLost())
        keeping.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("which", ["connection_retry", "command_retry"])
def test_servers_that_were_away_for_long_are_found_at_once(which: str) -> None:
    waited: list[float] = []

    def call() -> float:
        if sum(waited) < OUTAGE_S:
            raise ConnectionLoss
        return sum(waited)

    config = Configuration.from_mapping({"high-availability.zookeeper.quorum": "127.0.0.1:1"})
    retry = zookeeper_runner._options(config)[which]
    retry.sleep_func = waited.append
    assert retry(call) < OUTAGE_S + 1.5
    assert max(waited) < 1.5, "a second at most, and kazoo's jitter"


def test_who_is_deposed_ends_though_the_storage_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(reason: str) -> NoReturn:
        raise EndedError(reason)

    async def scenario() -> None:
        store, goes_on = LeaderStore(MemoryStore(1 << 20), "kept"), threading.Event()
        config = Configuration.from_mapping({"high-availability.zookeeper.quorum": "127.0.0.1:1"})
        LeadershipRunner(config, "own:1", store, end, SystemClock())
        store.take_over()
        monkeypatch.setattr(store, "verify", lambda: goes_on.wait(DEADLINE_S))
        monkeypatch.setattr(leadership_runner, "_LAST_LOOK_S", 0.01)
        with pytest.raises(EndedError, match="epoch 41 has it"):
            store.met(NewerLeader("epoch 41 has it", 41))
        goes_on.set()

    asyncio.run(scenario())


def test_two_clusters_that_share_an_id_are_told_of_each_other() -> None:
    """Elected elsewhere, both may lead: the later one is warned, the earlier one ends and hears of whom."""

    def end(reason: str) -> NoReturn:
        raise EndedError(reason)

    def stored(kept: MemoryStore, address: str, root: str) -> tuple[LeaderStore, LeadershipRunner]:
        settings = {
            "high-availability.zookeeper.quorum": "zk-2:1, zk-1:1",
            "high-availability.zookeeper.path.root": root,
        }
        store = LeaderStore(kept, "kept")
        config = Configuration.from_mapping(settings)
        return store, LeadershipRunner(config, address, store, end, SystemClock())

    async def scenario() -> None:
        kept = MemoryStore(1 << 20)
        first, its_runner = stored(kept, "jm-a:1", "/a")
        second, runner = stored(kept, "jm-b:1", "/b")
        with capture_logs() as logs:
            await its_runner._take_over()
            assert [line["event"] for line in logs] == ["leader.elected"]
            await runner._take_over()
        (warning,) = [line for line in logs if line["log_level"] == "warning"]
        assert "the JobManager at jm-a:1, elected at zk-1:1,zk-2:1/a/default" in warning["reason"]
        assert "give each an id of its own" in warning["reason"]
        with pytest.raises(
            EndedError, match=r"epoch 2 leads, the JobManager at jm-b:1, elected at .*/b/default"
        ):
            first.met(NewerLeader("job x is no longer that of leader epoch 1: epoch 2 has it", 2))
        assert second.epoch == 2

    asyncio.run(scenario())


def test_nobody_leads_on_a_storage_that_is_gone() -> None:
    """As where a directory is not mounted; without LEADER alone the jobs are there, and their epochs count."""
    kept = MemoryStore(1 << 20)
    store = LeaderStore(kept, "kept")
    with pytest.raises(StoreNotFound, match="although leader epoch 7 has led"):
        store.take_over(7)
    assert not kept.list("")
    kept.put("jobs/one", [b"its record"])
    store.take_over(7)
    assert store.epoch == 8


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "needs high-availability.storageDir and high-availability.zookeeper.quorum"),
        ({"high-availability.zookeeper.quorum": "h:1"}, "needs high-availability.storageDir:"),
        (
            {
                "high-availability.zookeeper.quorum": "h:1",
                "high-availability.storageDir": "hdfs://name/ha",
            },
            "high-availability.storageDir: 'hdfs://name/ha' names no store",
        ),
        (
            {
                "high-availability.zookeeper.quorum": "h:1",
                "high-availability.storageDir": "shared/ha",
            },
            "high-availability.storageDir: 'shared/ha' is a relative path",
        ),
        (
            {
                "high-availability.zookeeper.quorum": "h:1",
                "high-availability.storageDir": "/ha",
                "high-availability.zookeeper.client.acl": "creator",
            },
            "nobody is known as the creator",
        ),
        (
            {
                "high-availability.zookeeper.quorum": "h:1",
                "high-availability.storageDir": "/ha",
                "high-availability.zookeeper.client.auth": "digest",
            },
            "credentials-file",
        ),
    ],
)
def test_what_an_election_lacks_is_said_when_a_daemon_starts(
    settings: dict[str, str], text: str, tmp_path: Path
) -> None:
    config = Configuration.from_mapping({"high-availability.type": "zookeeper", **settings})
    with pytest.raises(ConfigurationError, match=text):
        config.check_for_daemons()


@pytest.mark.parametrize(
    "quorum", ["h:abc", "h:99999", "h:0", "a:1,,b:2", "a:1;b:2", "http://a:1", "a b:1", ":2181"]
)
def test_a_quorum_that_is_none_is_refused_with_its_key(quorum: str) -> None:
    told = f"high-availability.zookeeper.quorum = '{quorum}'.*is no ZooKeeper server"
    with pytest.raises(ConfigurationError, match=told):
        Configuration.from_mapping({"high-availability.zookeeper.quorum": quorum})


@pytest.mark.parametrize(
    ("quorum", "used"),
    [
        ("zk-1:2181, zk-2:2181", "zk-1:2181,zk-2:2181"),
        ("[::1]:2181,10.0.0.1", "[::1]:2181,10.0.0.1"),
        ("a:1,b:2/below", "a:1,b:2/below"),
    ],
)
def test_a_quorum_is_used_without_blanks(quorum: str, used: str) -> None:
    config = Configuration.from_mapping({"high-availability.zookeeper.quorum": quorum})
    assert config.high_availability_zookeeper_quorum == used


def test_no_node_below_the_root_is_called_by_dots() -> None:
    with pytest.raises(ConfigurationError, match=r"path\.root = '/a/\.\./b'"):
        Configuration.from_mapping({"high-availability.zookeeper.path.root": "/a/../b"})
