"""What a process of the data exchange says about itself, with the cluster's tokens as their file has them."""

from __future__ import annotations

from pathlib import Path

from common.keyring_runner import refresh_always
from common.pb import internal_pb2
from penstock.client.keyring import Keyring, parse_tokens
from taskmanager.network.handshake import SlotIdentity


def identity_of(configuration: internal_pb2.SlotConfiguration) -> SlotIdentity:
    """As this process was told; its tokens are read again as long as it lives."""
    path = Path(configuration.token_path) if configuration.token_path else None
    keyring = Keyring(parse_tokens(configuration.token, "what the TaskManager has told"), path)
    refresh_always(keyring)
    return SlotIdentity(
        configuration.job_id,
        configuration.slot_id,
        configuration.host_id,
        configuration.leader_epoch,
        keyring,
        configuration.oldest_peer_epoch,
    )
