"""Which files a checkpoint lets its sinks commit, under the names that they wait under and those that they get."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from penstock.errors import StoreCorrupt, StoreNotFound
from penstock.pb import checkpoint_pb2
from penstock.storage.prepared_output import COMMITTABLES
from penstock.storage.snapshot_files import StoreSnapshotReader

_OWNER_BYTES: Final = 4


def prepared_files(
    manifest: checkpoint_pb2.CheckpointManifest,
    sinks: Collection[str],
    reader: StoreSnapshotReader | None,
    untold: Callable[[str], object],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The uid of a sink, and how it commits a file, each.

    Args:
        sinks: uids of those that write files.
        reader: of lists that are not in the manifest; None = they are not read.
        untold: called with each sink whose files are not known.
    """
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            if operator.operator_uid not in sinks:
                continue
            for held in operator.lists:
                if held.name != COMMITTABLES:
                    continue
                if reader is None and held.HasField("handle"):
                    untold(operator.operator_uid)
                    continue
                try:
                    items = list(held.items)
                    if reader is not None and held.HasField("handle"):
                        content = reader.read(held.handle)
                        items = list(checkpoint_pb2.OperatorStateItems.FromString(content).items)
                    named = [json.loads(item[_OWNER_BYTES:]) for item in items]
                    files = [one for one in named if one["pending"] and one["final"]]
                except (StoreCorrupt, StoreNotFound, ValueError, LookupError, TypeError):
                    untold(operator.operator_uid)
                    continue
                for one in files:
                    yield operator.operator_uid, one
