"""Who may talk to whom (pure): checks of the first frames of a connection.

The data handshake fences: a slot process of another job, of an older leader epoch, or without the
cluster's token gets a refusal with the reason and nothing else. A partition server has no job of its own:
it lets slots of every job in, and each request names the job whose partition it means; of other jobs than its
own a slot may read what outlives them.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.client.keyring import Token, keyring_of
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION
from taskmanager.network.messages import Hello, HelloOk


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """What a process of the data exchange says about itself.

    Attributes:
        job_id: the only job it serves; "" = it is no slot but serves the partitions of any job.
        slot_id: of a slot; of a partition server a name that no slot has.
        token: the cluster's secret, "" = none.
        oldest_peer_epoch: slots that were started under an earlier leader of the job than its own, but that its own
            has taken over, are let in from this one on; 0 = there are none.
    """

    job_id: str
    slot_id: str
    host_id: str
    leader_epoch: int
    token: Token
    oldest_peer_epoch: int = 0


def hello_of(slot: SlotIdentity, endpoint: str) -> Hello:
    """The first frame of the connecting side."""
    return Hello(
        DAEMON_PROTOCOL_VERSION,
        slot.job_id,
        slot.slot_id,
        endpoint,
        slot.leader_epoch,
        keyring_of(slot.token).shown,
    )


def refusal_of(slot: SlotIdentity, hello: Hello) -> str | None:
    """Why the accepting slot does not let the peer in; None when it does."""
    if not keyring_of(slot.token).accepts(hello.token):
        return "the token is wrong: all TaskManagers of a cluster need the same security token"
    if hello.version != DAEMON_PROTOCOL_VERSION:
        return (
            f"the peer speaks version {hello.version} of the protocol of daemons, this slot speaks"
            f" {DAEMON_PROTOCOL_VERSION}: run the same version of Penstock everywhere"
        )
    if slot.job_id and hello.job_id != slot.job_id:
        return f"this slot serves job {slot.job_id}, not {hello.job_id}"
    oldest_epoch = slot.oldest_peer_epoch or slot.leader_epoch
    if hello.leader_epoch < min(oldest_epoch, slot.leader_epoch):
        return (
            f"the peer belongs to leader epoch {hello.leader_epoch}, which is over;"
            f" the current one is {slot.leader_epoch}"
        )
    return None


def mismatch_of(expected_endpoint: str, answer: HelloOk) -> str | None:
    """Why the accepting slot is not the one that was asked for; None when it is."""
    if answer.endpoint == expected_endpoint:
        return None
    return f"slot {answer.slot_id} ({answer.endpoint}) answered in its place"
