"""Which splits a source has, where it is not one of files: those that state has of it, and those that it discovers.

What is given of a split by its id alone is completed by what the source itself says of it. An id that neither knows would
be read by nobody, and the split that was meant from its start.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from penstock.connectors.source import Source, SourceContext, Split
from penstock.errors import BadRecord
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.rows.column_values import short_repr
from penstock.storage.codec import StateError
from penstock.storage.split_digest import DIGEST_BYTES, digest_of

DIGEST: Final = f"S{DIGEST_BYTES}"
_NAMED_MAX: Final = 10

_log = logging.getLogger("penstock")

Ask = Callable[[], Mapping[str, Split] | None]
"""What the source discovers, by id; None = it cannot be asked."""


def complete_splits(
    splits: Sequence[checkpoint_pb2.SplitSnapshot],
    stored: Sequence[checkpoint_pb2.SplitSnapshot],
    digests: np.ndarray,
    ask: Ask,
    where: str,
) -> None:
    """Gives splits that were named by their ids the payloads that the source knows them by.

    Args:
        splits: that a source is given; they are filled in.
        stored: those that the base names.
        digests: of those that were read to their end in it.
        ask: is called where the base does not say enough.
        where: the source, for messages.

    Raises:
        StateError: neither the base nor the source has one.
    """
    open_before = {split.id: split for split in stored if not split.done}
    done_before = {split.id for split in stored if split.done}
    is_read = np.isin(np.array([digest_of(split.id) for split in splits], DIGEST), digests)
    asked_for, unknown = [], []
    for split, digest_is_there in zip(splits, is_read, strict=True):
        is_known = split.id in open_before or split.id in done_before or digest_is_there
        if split.id in open_before:
            _fill(split, open_before[split.id])
        if not split.payload and not (is_known and split.done) and split.id not in open_before:
            asked_for.append(split)
            unknown += [] if is_known else [split.id]
    if not asked_for:
        return
    discovered = ask()
    own = discovered or {}
    for split in asked_for:
        if split.id in own:
            found = own[split.id]
            known = checkpoint_pb2.SplitSnapshot(
                payload=found.payload, size=found.size, min_event_time_ms=found.min_event_time_ms
            )
            _fill(split, known)
    unknown = [one for one in unknown if one not in own]
    if unknown:
        _refuse(unknown, [*open_before, *own], where, could_ask=discovered is not None)


def _refuse(unknown: Sequence[str], own: Sequence[str], where: str, *, could_ask: bool) -> None:
    """Refuses splits that nobody knows, or tells of them where the source could not be asked."""
    names = ", ".join(map(repr, unknown[:_NAMED_MAX]))
    if could_ask:
        has = ", ".join(map(repr, own[:_NAMED_MAX])) or "none"
        raise StateError(
            f"{where} has no split {names}: it has {has}; one that it does not discover any more needs its payload, as in "
            "the row that open_state gives of it"
        )
    _log.warning(
        "%s: nobody could say whether it has %s: a split that it does not have is ignored, and the one that was meant is read "
        "from its start; job= says it of sources of your own",
        where,
        names,
    )


def discovered_splits(
    operator: graph_pb2.Operator, parallelism: int, now_ms: int
) -> Mapping[str, Split] | None:
    """What a source discovers in this process: one of the user's own. Others have the splits that state names.

    Args:
        operator: in the job; without a source where there is no job.
        parallelism: of the source.

    Returns:
        Id -> split; None = it cannot be asked, which is told of in the log where it fails.
    """
    if operator.source.WhichOneof("kind") is None:
        return None
    if not operator.source.HasField("custom"):
        return {}
    try:
        source: Source = pickle.loads(operator.source.custom.pickled)
        context = SourceContext(
            job_id="",
            operator_name=operator.name,
            subtask_index=0,
            parallelism=parallelism,
            wake=lambda: None,
            now_ms=lambda: now_ms,
            bad_record=_raise_bad_record,
            artifact_paths={},
        )
        source.start(context)
        return {split.id: split for split in source.discover(context)}
    except Exception as error:  # noqa: BLE001 - the user's code, which may need what is not at hand here
        _log.warning(
            "source %r (uid %r) cannot be asked for its splits here: %s",
            operator.name,
            operator.uid,
            short_repr(error),
        )
        return None


def _fill(split: checkpoint_pb2.SplitSnapshot, known: checkpoint_pb2.SplitSnapshot) -> None:
    """What is not said of a split that is to be read; of what is done nothing is kept."""
    if split.done or split.payload:
        return
    split.payload = known.payload
    split.size = split.size or known.size
    if known.HasField("min_event_time_ms") and not split.HasField("min_event_time_ms"):
        split.min_event_time_ms = known.min_event_time_ms


def _raise_bad_record(where: str, text: str, error: str) -> Any:
    raise BadRecord(f"{where}: {error}: {short_repr(text)}")
