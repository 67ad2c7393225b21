"""State of an operator's subtask that belongs to no key: named lists of bytes.

The lists are small (positions, watermarks, commit records, a user's own). What a list means and how its
items are encoded is its owner's business. A snapshot copies the references: items never change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader, list_items

SPLIT = checkpoint_pb2.REDISTRIBUTION_SPLIT
UNION = checkpoint_pb2.REDISTRIBUTION_UNION
BROADCAST = checkpoint_pb2.REDISTRIBUTION_BROADCAST


def with_items(
    held: checkpoint_pb2.OperatorStateSnapshot, reader: SnapshotReader
) -> checkpoint_pb2.OperatorStateSnapshot:
    """The list with its items in place, also where they are in a file.

    Raises:
        StreamError: the file is missing or damaged.
    """
    found = checkpoint_pb2.OperatorStateSnapshot()
    found.CopyFrom(held)
    if held.HasField("handle"):
        found.items.extend(list_items(held, reader))
        for field in ("handle", "first_item", "item_count"):
            found.ClearField(field)
    return found


class OperatorList:
    """One named list.

    Attributes:
        items: the content; replaced or appended to by the owner, on the mailbox thread.
        codec: how items are encoded, for tools.
    """

    def __init__(
        self, redistribution: checkpoint_pb2.Redistribution.ValueType, items: Iterable[bytes] = ()
    ) -> None:
        self.redistribution = redistribution
        self.items: list[bytes] = list(items)
        self.codec = ""


class OperatorStateStore:
    """The lists of one operator in one subtask.

    Args:
        restored: lists as they were assigned to this subtask, items inline.
    """

    def __init__(self, restored: Iterable[checkpoint_pb2.OperatorStateSnapshot] = ()) -> None:
        self._lists: dict[str, OperatorList] = {}
        for snapshot in restored:
            found = self.list(snapshot.name, snapshot.redistribution)
            found.items += snapshot.items
            found.codec = snapshot.codec

    def list(
        self,
        name: str,
        redistribution: checkpoint_pb2.Redistribution.ValueType = SPLIT,
    ) -> OperatorList:
        """The list of that name, with what was restored; empty where there is none yet."""
        found = self._lists.get(name)
        if found is None:
            found = self._lists[name] = OperatorList(redistribution)
        return found

    def snapshot(self) -> Sequence[checkpoint_pb2.OperatorStateSnapshot]:
        """All lists that are not empty."""
        return [
            checkpoint_pb2.OperatorStateSnapshot(
                name=name, redistribution=held.redistribution, items=held.items, codec=held.codec
            )
            for name, held in self._lists.items()
            if held.items
        ]
