"""The connection of a client: to whichever of the JobManagers leads.

The addresses that were given are asked first, in order: names that JobManagers have for each other may mean nothing
to a client. Where there are several JobManagers, one that does not lead is no end: who leads is waited for.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from penstock.client.addresses import parse_addresses
from penstock.client.announced_tokens import find_token
from penstock.client.client_tls import ClientTls, open_channel, trusted_bytes, why_no_channel
from penstock.client.credentials import token_metadata
from penstock.client.greeting import check_answer, greeting, older_cluster
from penstock.client.grpc_errors import (
    UNANSWERED,
    error_from_rpc,
    is_ended_here,
    is_ours,
    unanswered,
)
from penstock.client.keyring import Token, keyring_of
from penstock.client.protocol import TRANSPORT_OPTIONS
from penstock.client.shielded import shielded
from penstock.errors import (
    ConfigurationError,
    JobManagerUnreachable,
    NotLeader,
    ProtocolMismatch,
    StreamError,
)
from penstock.pb import client_pb2_grpc

_LEADER_PAUSE_S = 0.1
_PATIENCE_S = 1.0
"""With one of several JobManagers, at first; it doubles."""

_OPTIONS = [
    *TRANSPORT_OPTIONS,
    # A JobManager that vanishes without a word is noticed by pings, also in the middle of a stream.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]


@dataclass(frozen=True, slots=True, eq=False)
class LeaderChannel:
    """A channel to one JobManager.

    Attributes:
        closings: how often the client had been closed when it was opened.
    """

    stub: client_pb2_grpc.JobManagerStub
    close: Callable[[], object]
    closings: int


class LeaderConnection:
    """See the module. May be used by several threads at once.

    Args:
        addresses: as of ``Client``.
        token: as of ``Client``.
        connect_timeout_s: how long each address may take to answer.
        leader_timeout_s: how long to wait for one of several JobManagers to lead.
        tls: as of ``Client``.

    Raises:
        ConfigurationError: that is no list of addresses.
    """

    def __init__(
        self,
        addresses: str,
        token: Token | None,
        connect_timeout_s: float,
        leader_timeout_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        self._addresses = parse_addresses(addresses)
        self._token = token
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self.leader_timeout_s = leader_timeout_s
        self._keyring = keyring_of(token or "")
        self.has_standbys = len(self._addresses) > 1
        """Another JobManager may lead after this one."""
        self.leader = ""
        """Where the one is that has answered last."""
        self.older_cluster = ""
        """What to mind, where that is of an earlier version."""
        self._connecting = threading.Lock()
        self._lock = threading.Lock()
        self._opened: LeaderChannel | None = None
        """To who leads, or to who is greeted."""
        self._connected: LeaderChannel | None = None
        self._closings = 0
        self._trusted = b""
        """The CAs that the channel was opened with."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each call, with the token that is in force now."""
        # What cannot be used leaves the one that was; where that is refused, the answer says what to do.
        with suppress(ConfigurationError):
            self._keyring.refresh()
        return token_metadata(self._keyring)

    @property
    def may_be_answered(self) -> bool:
        """Whether a call that was not is worth another one: somebody else may lead, or the CAs were exchanged since."""
        return self.has_standbys or trusted_bytes(self._tls) != self._trusted

    def close(self) -> None:
        """Closes the channel and ends the calls on it, and whatever waits for who leads."""
        with self._lock:
            self._closings += 1
            opened = self._opened
        if opened is not None:
            self._drop(opened)

    def _drop(self, channel: LeaderChannel) -> None:
        """Closes a channel. The one that has taken its place meanwhile, with the calls of others, stays."""
        with self._lock:
            if self._opened is channel:
                self._opened = self._connected = None
        shielded(channel.close)

    def _is_left(self, closings: int) -> bool:
        return closings != self._closings

    def channel(self) -> LeaderChannel:
        """That to the JobManager that leads; connects where nothing is connected.

        Raises:
            JobManagerUnreachable: nobody answers, or nobody has come to lead in time.
            ProtocolMismatch: another version, or no JobManager.
            Unauthenticated: the token is missing or wrong.
            StreamError: the client was closed meanwhile.
        """
        closings = self._closings
        with self._connecting:
            return self._connected or self._connect(closings)

    def _connect(self, closings: int) -> LeaderChannel:
        """Finds who leads; where there are several JobManagers, waits for one that does."""
        deadline, patience_s = time.monotonic() + self.leader_timeout_s, _PATIENCE_S
        while True:
            failures: list[JobManagerUnreachable] = []
            if (channel := self._greeted(failures, patience_s, closings)) is not None:
                return channel
            patience_s *= 2
            if not self.has_standbys or time.monotonic() >= deadline:
                break
            time.sleep(_LEADER_PAUSE_S)
        raise JobManagerUnreachable(
            f"no JobManager answers at {', '.join(self._addresses)} ({'; '.join(map(str, failures))}): start "
            "one with `penstock cluster start`, or name its address with --jobmanager HOST:PORT"
        )

    def _greeted(
        self, failures: list[JobManagerUnreachable], patience_s: float, closings: int
    ) -> LeaderChannel | None:
        """Asks the addresses that were given, then those that standbys have told of, who leads.

        Args:
            failures: gets what they have answered.
            patience_s: for each, where there are several: one that is silent does not keep the others from being asked.
        """
        asked = list(self._addresses)
        for named in asked:
            address = self._look_up(named)
            self._trusted = trusted_bytes(self._tls)
            channel = self._open(address, closings)
            try:
                self._greet(address, channel, patience_s if self.has_standbys else math.inf)
            except JobManagerUnreachable as error:
                self._drop(channel)
                failures.append(error)
                if isinstance(error, NotLeader):
                    self.has_standbys = True
                    asked += [error.leader] * (bool(error.leader) and error.leader not in asked)
            except BaseException:
                self._drop(channel)
                raise
            else:
                with self._lock:
                    # Whoever has closed the client meanwhile has closed this channel.
                    if self._opened is channel:
                        self._connected = channel
                    self.leader = named
                return channel
        return None

    def _open(self, address: str, closings: int) -> LeaderChannel:
        """Opens a channel.

        Raises:
            StreamError: the client was closed since somebody has asked for it.
        """
        channel = open_channel(address, _OPTIONS, self._tls)
        # Also where nobody closes the client: a call that is left over would hold up the exit.
        close = weakref.finalize(self, channel.close)
        opened = LeaderChannel(client_pb2_grpc.JobManagerStub(channel), close, closings)
        with self._lock:
            is_left = self._is_left(closings)
            self._opened = None if is_left else opened
        if is_left:
            close()
            raise _ended_here("the client was closed")
        return opened

    def _look_up(self, named: str) -> str:
        """Where to connect to; takes the token of the cluster there where none was given."""
        if self._token is not None:
            return named
        found = find_token(named)
        self._keyring = keyring_of("" if found is None else found.token)
        return named if found is None else found.address

    def _greet(self, address: str, channel: LeaderChannel, patience_s: float) -> None:
        timeout_s = min(patience_s, self._connect_timeout_s)
        try:
            response = channel.stub.Hello(greeting(), timeout=timeout_s, metadata=self.metadata)
        except ValueError as error:
            raise self.closed(error, channel) from error
        except grpc.RpcError as error:
            ours = self.translated(error, channel, f"{address}: ")
            # One that is silent has no word on TLS either, and the next is to be asked.
            is_silent = patience_s < math.inf and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if type(ours) is JobManagerUnreachable and not is_silent:
                why = why_no_channel(address, self._tls)
                ours = JobManagerUnreachable(f"{address}: {why}") if why else ours
            raise ours from error
        check_answer(response, address)
        self.older_cluster = older_cluster(response, address)

    def translated(
        self, error: grpc.RpcError, channel: LeaderChannel, prefix: str = ""
    ) -> StreamError:
        """Our error for one of a call; the channel is closed where it may lead nowhere any more.

        Args:
            channel: of the call.
            prefix: which address was greeted; "" = the call went to who leads.
        """
        call: Any = error
        code = call.code()
        if is_ours(error):
            ours = error_from_rpc(error)
            if isinstance(ours, NotLeader) and not prefix:
                self._drop(channel)
            return ours
        if is_ended_here(error) or (code in UNANSWERED and self._is_left(channel.closings)):
            return _ended_here(call.details())
        if code in UNANSWERED:
            if code is not grpc.StatusCode.DEADLINE_EXCEEDED and not prefix:
                # What answered may be gone for good: look for the leader at the next call.
                self._drop(channel)
            where = prefix or f"the JobManager at {', '.join(self._addresses)} does not answer: "
            after = "" if prefix else "; is it running? `penstock cluster status` tells"
            why = "" if prefix or self._tls is None else why_no_channel(self.leader, self._tls)
            return JobManagerUnreachable(f"{where}{why or unanswered(code, call.details())}{after}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolMismatch(
                f"{prefix}what answers there is no JobManager of this version ({call.details()}): "
                "check the address, which may be a TaskManager's, and install the same version on both sides"
            )
        return error_from_rpc(error)

    def closed(self, error: ValueError, channel: LeaderChannel) -> StreamError:
        """What a call on a channel that another thread has just closed ends with."""
        if "closed" not in str(error):
            raise error
        if self._is_left(channel.closings):
            return _ended_here("the client was closed while the call began")
        return JobManagerUnreachable("the connection was closed while the call began")


def _ended_here(why: str) -> StreamError:
    return StreamError(f"the call was ended on this side: {why}")
