"""Aim: daemons of one protocol understand each other, whatever versions they are of.

Method: what the messages of all calls between daemons hold is compared with what they held when the protocol got its
number (tests/golden/daemon_protocol.txt). What has come since is skipped by those that do not know it; what has gone, or
means something else, is a new protocol. PENSTOCK_TRANSCRIPTS=rewrite writes the file for it.
"""

from __future__ import annotations

import os
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from common.pb import internal_pb2
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION

GOLDEN = Path(__file__).parents[2] / "golden" / "daemon_protocol.txt"


def of_field(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    named = kind.name if kind is not None else f"type-{field.type}"
    return f"{field.number}={field.name}:{named}{'*' if field.is_repeated else ''}"


def spoken() -> dict[str, set[str]]:
    """Message or call -> what it has."""
    found: dict[str, set[str]] = {}

    def walk(message: Descriptor) -> None:
        if message.full_name not in found:
            found[message.full_name] = {of_field(field) for field in message.fields}
            for field in message.fields:
                if field.message_type is not None:
                    walk(field.message_type)

    for service in internal_pb2.DESCRIPTOR.services_by_name.values():
        for call in service.methods:
            found[call.full_name] = {call.input_type.name, call.output_type.name}
            walk(call.input_type)
            walk(call.output_type)
    return found


def test_what_daemons_say_is_changed_with_the_number_of_their_protocol_only() -> None:
    now = spoken()
    assert len(now) > 100, "the walk finds what there is"
    if os.environ.get("PENSTOCK_TRANSCRIPTS") == "rewrite":
        lines = [" ".join([name, *sorted(parts)]) for name, parts in sorted(now.items())]
        GOLDEN.write_text("\n".join([str(DAEMON_PROTOCOL_VERSION), *lines]) + "\n")
    number, *lines = GOLDEN.read_text().splitlines()
    assert int(number) == DAEMON_PROTOCOL_VERSION, "a new protocol: PENSTOCK_TRANSCRIPTS=rewrite"
    then = {name: set(parts) for name, *parts in (line.split() for line in lines)}
    gone = {name: parts - now.get(name, set()) for name, parts in then.items()}
    assert {name: parts for name, parts in gone.items() if parts} == {}, (
        "an earlier daemon would misunderstand it: count up DAEMON_PROTOCOL_VERSION"
    )
