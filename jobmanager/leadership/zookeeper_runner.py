"""One JobManager's part in the election: a session with ZooKeeper, and a node of it that ends with the session.

Who has the node with the smallest number is proposed. Whether it leads is not decided here (``leader_store.py``):
a session may be over without its owner's knowledge.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionClosedError,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    SASLException,
    SessionClosedRequireSaslError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from common.outage_log import OutageLog
from jobmanager.leadership.election import (
    Connected,
    Elected,
    ElectionEvent,
    LeaderNode,
    LeaderTold,
    SessionLost,
    Suspended,
    before,
    decode_leader,
    encode_leader,
)
from penstock.client.secret_files import read_secret
from penstock.config import Configuration
from penstock.errors import ConfigurationError

_RETRY_FIRST_S: Final = 0.1
_RETRY_MAX_S: Final = 1.0
_STOP_TIMEOUT_S: Final = 2.0
_REFUSED_PAUSE_S: Final = 5.0
_OF_CREDENTIALS: Final = (
    AuthFailedError,
    InvalidACLError,
    NoAuthError,
    SASLException,
    SessionClosedRequireSaslError,
)


class ZookeeperRunner:
    """A candidate.

    Args:
        config: of the cluster.
        address: under which this JobManager is reached.
        tell: takes what is heard, on the event loop that makes this.

    Raises:
        ConfigurationError: the credentials cannot be read.
    """

    def __init__(
        self, config: Configuration, address: str, tell: Callable[[ElectionEvent], None]
    ) -> None:
        self._base = _base(config)
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._tell_loop = tell
        self._client = KazooClient(**_options(config))
        self._session_s = config.high_availability_zookeeper_client_session_timeout_ms / 1000
        self._forgetting: asyncio.TimerHandle | None = None
        # One each: for what is said, for what is removed, and for leaving.
        self._threads = ThreadPoolExecutor(3, "zookeeper")
        self._token = uuid.uuid4().hex
        self._node = ""
        self._is_watching = False
        self._changed = threading.Event()
        self._is_over = False
        self._contending: threading.Thread | None = None
        self._refusals = OutageLog(
            structlog.get_logger(__name__), "election.refused", "election.admitted", "error"
        )

    def start(self) -> None:
        """Takes part from now on; what comes of it is told."""
        self._client.add_listener(self._state_changed)
        self._client.start_async()

    def _watch_outage(self, *, is_cut: bool) -> None:
        """The connection is lost, or there again."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = (
            self._loop.call_later(self._session_s, self._forget_transactions) if is_cut else None
        )

    def _forget_transactions(self) -> None:
        """Lets servers answer that have lost their data.

        They refuse for ever who has seen a newer transaction than they know of, without a word on the session.
        An outage that lasts as long as a session is an end of it, or one of the whole ensemble, whose servers catch
        up before they answer again: so nothing older is seen by this.
        """
        if not self._client.connected:
            self._client.last_zxid = 0

    async def say(self, epoch: int) -> None:
        """Says that this JobManager leads, however long that takes: the servers may be away, or refuse it for a while."""
        leader = encode_leader(LeaderNode(self._address, epoch, self._node))
        while not self._is_over:
            try:
                await self._run(self._write_leader, leader)
            except (KazooException, KazooTimeoutError) as error:
                if not self._is_over:
                    self._refused(error, "nobody is told that this JobManager leads")
                    await asyncio.sleep(_REFUSED_PAUSE_S)
            else:
                self._refusals.worked()
                return

    async def remove(self, leader: LeaderNode) -> None:
        """Takes the node of a leader out of the election that is dead for sure."""
        with contextlib.suppress(KazooException, KazooTimeoutError):
            await self._run(self._delete, leader.node)

    async def stop(self) -> None:
        """Leaves the election; once is enough."""
        if self._is_over:
            return
        self._is_over = True
        self._watch_outage(is_cut=False)
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._run(self._leave)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[..., None], *arguments: object) -> None:
        """Calls that last as long as an outage hold up nobody else."""
        await self._loop.run_in_executor(self._threads, work, *arguments)

    def _refused(self, error: Exception, what: str) -> None:
        kind = type(error).__name__
        why = f"ZooKeeper has not done what it was asked for at {self._base} ({kind}): {what}; it is tried again"
        if isinstance(error, _OF_CREDENTIALS):
            why = (
                f"ZooKeeper refuses {self._base} ({kind}): {what}; check that "
                "high-availability.zookeeper.client.auth and .credentials-file are those of the others"
            )
        self._refusals.failed(kind, retry_s=_REFUSED_PAUSE_S, reason=why)

    # ------------------------------------------------------------ on threads of kazoo and of this

    def _tell(self, event: ElectionEvent) -> None:
        self._on_loop(partial(self._tell_loop, event))

    def _on_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(call)

    def _state_changed(self, state: str) -> None:
        if self._is_over:
            return
        self._on_loop(partial(self._watch_outage, is_cut=state != KazooState.CONNECTED))
        if state == KazooState.LOST:
            self._tell(SessionLost())
        elif state == KazooState.SUSPENDED:
            self._tell(Suspended())
        else:
            self._tell(Connected())
            if self._contending is None:
                self._contending = threading.Thread(
                    target=self._contend, name="election", daemon=True
                )
                self._contending.start()

    def _contend(self) -> None:
        """Takes part; where the servers refuse that, tries again, since access is given while they and this run."""
        while not self._is_over:
            try:
                self._take_part()
            except (ConnectionClosedError, KazooTimeoutError):
                if not self._is_over:
                    raise
            except KazooException as error:
                self._refused(error, "this JobManager stands by and cannot lead")
                self._changed.clear()
                if not self._is_over:
                    self._changed.wait(_REFUSED_PAUSE_S)
            else:
                return

    def _take_part(self) -> None:
        self._watch_leader()
        self._node = self._client.retry(self._join)
        self._refusals.worked()
        while not self._is_over:
            rival = before(self._node, self._client.retry(self._nodes))
            if rival is None:
                self._tell(SessionLost())
                return
            if not rival:
                self._tell(Elected())
                return
            self._changed.clear()
            if self._client.retry(
                self._client.exists, f"{self._election}/{rival}", self._rival_changed
            ):
                self._changed.wait()

    def _watch_leader(self) -> None:
        """Hears who leads from now on; once is enough."""
        if self._is_watching:
            return
        path = f"{self._base}/leader"
        with contextlib.suppress(NoNodeError):  # a watch that is refused would listen all the same
            self._client.retry(self._client.get, path)
        self._client.DataWatch(path, self._leader_changed)
        self._is_watching = True

    @property
    def _election(self) -> str:
        return f"{self._base}/election"

    def _join(self) -> str:
        """Makes the node; one that was made although the answer was lost is found again."""
        self._client.ensure_path(self._election)
        for name in self._nodes():
            if name.startswith(self._token):
                return name
        made: str = self._client.create(
            f"{self._election}/{self._token}-",
            self._address.encode(),
            ephemeral=True,
            sequence=True,
        )
        return made.rpartition("/")[2]

    def _nodes(self) -> list[str]:
        found: list[str] = self._client.get_children(self._election)
        return found

    def _rival_changed(self, _event: object) -> None:
        self._changed.set()

    def _leader_changed(self, content: bytes | None, _stat: object) -> None:
        self._tell(LeaderTold(None if content is None else decode_leader(content)))

    def _write_leader(self, content: bytes) -> None:
        path = f"{self._base}/leader"

        def write() -> None:
            try:
                self._client.set(path, content)
            except NoNodeError:
                with contextlib.suppress(NodeExistsError):
                    self._client.create(path, content, makepath=True)

        self._client.retry(write)

    def _delete(self, node: str) -> None:
        with contextlib.suppress(NoNodeError):
            self._client.delete(f"{self._election}/{node}")

    def _leave(self) -> None:
        if self._node and self._client.connected:
            with contextlib.suppress(KazooException):
                self._delete(self._node)
        self._client.stop()
        self._client.close()


def place_of_election(config: Configuration) -> str:
    """Servers and path, for people: two that differ may be two elections."""
    servers = config.high_availability_zookeeper_quorum.replace(" ", "").split(",")
    return f"{','.join(sorted(servers))}{_base(config)}"


def _base(config: Configuration) -> str:
    return f"{config.high_availability_zookeeper_path_root}/{config.high_availability_cluster_id}"


def _options(config: Configuration) -> dict[str, Any]:
    retry = {"max_tries": -1, "delay": _RETRY_FIRST_S, "max_delay": _RETRY_MAX_S}
    options: dict[str, Any] = {
        "hosts": config.high_availability_zookeeper_quorum,
        "timeout": config.high_availability_zookeeper_client_session_timeout_ms / 1000,
        "connection_retry": KazooRetry(**retry),
        "command_retry": KazooRetry(**retry),
    }
    auth = config.high_availability_zookeeper_client_auth
    if auth != "none":
        file = config.high_availability_zookeeper_client_credentials_file
        key = "high-availability.zookeeper.client.credentials-file"
        credentials = read_secret(Path(file), f"{key} {file}").strip()
        user, separator, password = credentials.partition(":")
        if not user or not separator or not password:
            raise ConfigurationError(f"{key} {file} must hold user:password on one line")
        if auth == "digest":
            options["auth_data"] = [("digest", credentials)]
        else:
            options["sasl_options"] = {
                "mechanism": "DIGEST-MD5",
                "username": user,
                "password": password,
            }
    if config.high_availability_zookeeper_client_acl == "creator":
        options["default_acl"] = CREATOR_ALL_ACL
    return options
