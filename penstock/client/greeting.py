"""The first words of a client and a JobManager: which versions they speak."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from penstock.client.protocol import DAEMON_PROTOCOL_VERSION, PROTOCOL_VERSION
from penstock.errors import ProtocolMismatch
from penstock.pb import client_pb2


def greeting() -> client_pb2.HelloRequest:
    """What a client says first."""
    return client_pb2.HelloRequest(
        protocol_version=PROTOCOL_VERSION, client_version=_version_of("penstock")
    )


def check_answer(answer: client_pb2.HelloResponse, address: str) -> None:
    """Whether what answered at an address can be talked to.

    Raises:
        ProtocolMismatch: it is a JobManager of another version.
    """
    if answer.protocol_version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the JobManager at {address} (penstock {answer.server_version}) speaks protocol "
            f"{answer.protocol_version}, this client speaks {PROTOCOL_VERSION}: install the "
            "same version on both sides"
        )


def older_cluster(answer: client_pb2.HelloResponse, address: str) -> str:
    """What to mind where the cluster is older than this client, which it may not understand in all; "" = it is not."""
    if answer.daemon_protocol_version >= DAEMON_PROTOCOL_VERSION:
        return ""
    theirs = answer.daemon_protocol_version or f"less than {DAEMON_PROTOCOL_VERSION}"
    return (
        f"mind that the cluster is older than this client: the JobManager at {address} (penstock "
        f"{answer.server_version}) has protocol {theirs} of daemons, this client (penstock {_version_of('penstock')}) "
        f"{DAEMON_PROTOCOL_VERSION}: upgrade the cluster before its clients, or submit with its version"
    )


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
