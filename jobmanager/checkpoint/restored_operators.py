"""What subtasks begin with of one operator: snapshots to the words of ``state_assignment``, and back.

Lists of large size lie in files. A subtask that gets only some of a file's items is told which.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.pb import internal_pb2
from jobmanager.checkpoint.state_assignment import (
    HeldList,
    HeldState,
    ItemRun,
    KeyedPart,
    Redistribution,
    Share,
    assign_state,
    check_max_parallelism,
)
from penstock.pb import checkpoint_pb2

_REDISTRIBUTIONS = {
    checkpoint_pb2.REDISTRIBUTION_SPLIT: Redistribution.SPLIT,
    checkpoint_pb2.REDISTRIBUTION_UNION: Redistribution.UNION,
    checkpoint_pb2.REDISTRIBUTION_BROADCAST: Redistribution.BROADCAST,
}

_HeldState = HeldState[
    checkpoint_pb2.KeyedStateSnapshot,
    checkpoint_pb2.OperatorStateSnapshot,
    checkpoint_pb2.SplitSnapshot,
]


def restored_operators(
    uid: str,
    name: str,
    held: Sequence[checkpoint_pb2.OperatorSnapshot | None],
    parallelism: int,
    max_parallelism: int,
) -> list[internal_pb2.RestoredOperator]:
    """What each new subtask begins with.

    Args:
        name: of the operator, for messages.
        held: by old subtask; None = it had nothing.

    Raises:
        Unrecoverable: its keys belonged to other key-groups.
        StoreCorrupt: key-groups overlap.
    """
    states: list[_HeldState | None] = []
    for operator in held:
        if operator is not None and operator.HasField("keyed"):
            check_max_parallelism(name, operator.keyed.max_parallelism, max_parallelism)
        states.append(None if operator is None else _held_state(operator))
    # Splits of older checkpoints were made for as many subtasks as there were.
    made_for = max(
        (one.split_parallelism or (len(held) if one.splits else 0) for one in held if one),
        default=0,
    )
    return [
        internal_pb2.RestoredOperator(
            operator_uid=uid,
            keyed=assigned.keyed,
            lists=map(list_of, assigned.lists),
            splits=assigned.splits,
            split_parallelism=made_for,
        )
        for assigned in assign_state(states, parallelism, max_parallelism, _size_of)
    ]


def run_of(
    held: checkpoint_pb2.OperatorStateSnapshot,
) -> ItemRun[checkpoint_pb2.OperatorStateSnapshot]:
    """The items of a list; a file whose items are not counted cannot be taken apart."""
    count = (held.item_count or 1) if held.HasField("handle") else len(held.items)
    return ItemRun(held, count)


def list_of(
    share: Share[checkpoint_pb2.OperatorStateSnapshot],
) -> checkpoint_pb2.OperatorStateSnapshot:
    """The list that a share of another one is."""
    held = share.run.handle
    if share.is_whole:
        return held
    part = checkpoint_pb2.OperatorStateSnapshot()
    part.CopyFrom(held)
    if held.HasField("handle"):
        part.first_item, part.item_count = held.first_item + share.first, share.count
    else:
        del part.items[:]
        part.items.extend(held.items[share.first : share.first + share.count])
    return part


def _size_of(split: checkpoint_pb2.SplitSnapshot) -> int:
    return 0 if split.done else max(split.size, 1)


def _held_state(operator: checkpoint_pb2.OperatorSnapshot) -> _HeldState:
    keyed = operator.keyed
    return HeldState(
        KeyedPart(keyed.first_key_group, keyed.last_key_group, keyed)
        if operator.HasField("keyed")
        else None,
        tuple(
            HeldList(held.name, _REDISTRIBUTIONS[held.redistribution], run_of(held))
            for held in operator.lists
        ),
        tuple(operator.splits),
    )
