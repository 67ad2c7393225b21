"""What a message from another process may say: a bound for every field of every call.

gRPC bounds the size of a message; nothing bounds what a small one can ask for: a number of which something is
made, a list with work for each entry, a name that becomes a file's. ``check_message`` looks at a message before
anything is done with it, on every server and at every answer.

Bounds go by the field's name, so that one name means the same everywhere. Invariant: every field that can be
reached from a call has a bound in one of the tables, or is listed as a number of which nothing is made (a test
walks all calls).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from penstock.errors import JobRejected


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NAME_MAX = 4_096
_TEXT_MAX = 4 * 1024 * 1024

NAMES = _words(
    """
    aggregate artifact backend cloudpickle_version cluster_id codec key_codec collect_id colocation_group column compression delimiter directory display_name
    edge_id error_class exception file format function host host_id id incarnation instance java_version job_id job_name kept kind name operator
    operator_uid output_directory output_uid path path_as_given checkpoint_directory shared_directory promoted_as python_version client_version replaces_job_id rpc_address
    side_tag slot_group sort_by target
    slot_id operation_id source_vertex store tag target_vertex taskmanager_id tcp_host uid unix_path updates_of version vertex late_tag key
    """
)
"""Texts that are compared, shown in one line, or name a file: ids, names, addresses."""

TEXTS = _words("message reason row position traceback value options_json source state text")
"""Texts for people, those of the configuration, compiled loops, and names that are put together."""

COUNTS: dict[str, int] = {
    # of a cluster
    "ids": 10_000,
    "slot_ids": 10_000,
    "kept_slot_ids": 10_000,
    "held_slots": 10_000,
    "endpoints": 10_000,
    "packages": 100_000,
    "partitions": 100_000,
    "promoted": 100_000,
    # of attempts; events of one batch
    "metrics": 1_000_000,
    "held_attempts": 1_000_000,
    "ended_attempts": 1_000_000,
    "reads": 1_000_000,
    "written": 10_000,
    "found": 1_000_000,
    "given": 1_000_000,
    "commands": 1_000_000,
    "events": 100_000,
    "tasks": 100_000,
    "splits": 1_000_000,
    "replaces": 1_000_000,
    "cause_chain": 10_000,
    "sinks": 10_000,
    "kept": 100_000,
    # of a graph
    "artifacts": 10_000,
    "requirements": 10_000,
    "run_options": 10_000,
    "run_arguments": 10_000,
    "config": 10_000,
    "vertices": 10_000,
    "operators": 10_000,
    "edges": 100_000,
    "columns": 100_000,
    "arguments": 1_000_000,
    "nodes": 10_000,
    "aggregates": 100_000,
    "states": 100_000,
    "keys": 10_000,
    "second_keys": 10_000,
    "key_columns": 10_000,
    "partition_by": 10_000,
    "unread_columns": 100_000,
    "stream_columns": 100_000,
    "sort_by": 10_000,
    "input_schemas": 1_000,
    "nulls": 10_000,
    "optional": 100_000,
    "never_null": 100_000,
    "lines": 100_000,
    "passed": 100_000,
    "results": 100_000,
    "raised": 10_000,
    "attributes": 10_000,
    # of channels and snapshots
    "inputs": 1_000_000,
    "outputs": 1_000_000,
    "channels": 1_000_000,
    "finished_subpartitions": 100_000,
    "files": 1_000_000,
    "tables": 1_000_000,
    "segments": 10_000_000,
    "parts": 10_000_000,
    "lists": 1_000_000,
    "keyed": 1_000_000,
    "items": 10_000_000,
    "last_states": 1_000_000,
}
"""Repeated field -> how many entries it may have."""

_INDEX_MAX = 100_000
SLOTS_MAX = 1_024
RANGES: dict[str, tuple[int, int]] = {
    "slots": (0, SLOTS_MAX),
    "pid": (0, 2**31 - 1),
    "port": (0, 65_535),
    "tcp_port": (0, 65_535),
    "subtask_index": (-1, _INDEX_MAX),
    "subpartition_index": (0, _INDEX_MAX),
    "finished_subpartitions": (0, _INDEX_MAX),
    "attempt": (-1, 2**31 - 2),
    "producer_attempt": (-1, 2**31 - 2),
    "index": (0, _INDEX_MAX),
    "input": (0, 1_000),
    "operator_index": (-1, _INDEX_MAX),
    "target_input": (0, 1_000),
    "cores": (0, 1_024),
    "argument_count": (0, 10_000),
    "parallelism": (0, _INDEX_MAX),
    "max_parallelism": (0, _INDEX_MAX),
    "target_parallelism": (0, _INDEX_MAX),
    "target_max_parallelism": (0, _INDEX_MAX),
    "subpartition_count": (0, _INDEX_MAX),
    "first_key_group": (-1, _INDEX_MAX),
    "last_key_group": (-1, _INDEX_MAX),
    "partition_count": (0, 1_000_000),
    "split_parallelism": (0, _INDEX_MAX),
    "dropped": (0, 2**31 - 1),
    "timeout_ms": (0, 10 * 366 * 24 * 3600 * 1000),
    "interval_ms": (0, 7 * 24 * 3600 * 1000),
    "heartbeat_interval_ms": (1, 365 * 24 * 3600 * 1000),
    "heartbeat_timeout_ms": (1, 365 * 24 * 3600 * 1000),
}
"""Number -> the smallest and the largest that is taken: something is made of it, or indexed by it."""

COMPARED = _words(
    """
    aligned_bytes alignment_ms allocation_id allowed_lateness_ms async_ms back_pressured_ms bad_records busy_ms bytes_in bytes_out cache_hits
    cache_misses checkpoint_aligned_bytes checkpoint_alignment_ms checkpoint_async_ms checkpoint_id checkpoint_start_delay_ms checkpoint_sync_ms
    checkpoint_uploaded_bytes checksum count event_interval_us events file_bytes file_count first_checkpoint_id first_event_time_ms first_item
    format_version from_version gap_ms id idle_ms idle_timeout_ms in_credit_bytes in_queued_bytes inactivity_interval_ms item_count late_records
    leader_epoch level0_files limit lines local_backup_failures lower_ms max_delay_ms memory_bytes memtable_bytes min_event_time_ms
    min_size_bytes namespace offset offset_ms oldest_peer_epoch out_of_orderness_ms out_waiting_batches pending_compaction_bytes promoted_at_ms
    protocol_version rate records_in records_out restored_local_bytes restored_store_bytes roll_interval_ms roll_size_bytes row_count rows
    savepoint_id seed beside
    sequence since size size_bytes size_ms slide_ms spill_bytes start_delay_ms state_bytes sync_ms table timestamp_ms to_version ttl_ms
    uploaded_bytes upper_ms version watch_interval_ms watermark_ms
    """
)
"""Numbers that are added, compared and shown: their type bounds them."""

NUMBERS = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
        FieldDescriptor.CPPTYPE_FLOAT,
        FieldDescriptor.CPPTYPE_DOUBLE,
    }
)

_Check = Callable[[Any], None]


def check_message(message: Message) -> None:
    """Looks whether a message keeps to the bounds.

    Raises:
        JobRejected: it does not; which field, and what is taken.
    """
    checks = _checks(message.DESCRIPTOR)
    if not checks:
        return
    for field, value in message.ListFields():
        for check in checks.get(field.name, ()):
            check(value)


@cache
def _checks(descriptor: Descriptor) -> dict[str, tuple[_Check, ...]]:
    """What is to be looked at in a message of this type, field by field."""
    checks = {field.name: tuple(_checks_of(field)) for field in descriptor.fields}
    return {name: found for name, found in checks.items() if found}


def _checks_of(field: FieldDescriptor) -> list[_Check]:
    where = ".".join(field.full_name.rsplit(".", 2)[-2:])
    checks: list[_Check] = []
    if field.is_repeated:
        checks.append(_count_check(where, COUNTS.get(field.name, 0)))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return [*checks, _map_check(_text_check(where, _TEXT_MAX))]
    one = _value_check(field, where)
    if one is not None:
        checks.append(_each(one) if field.is_repeated else one)
    return checks


def _value_check(field: FieldDescriptor, where: str) -> _Check | None:
    if field.message_type is not None:
        if not _needs_a_look(field.message_type):
            return None
        return check_message
    if field.type == FieldDescriptor.TYPE_STRING:
        return _text_check(where, _TEXT_MAX if field.name in TEXTS else _NAME_MAX)
    if field.enum_type is not None:
        return _constant_check(where, frozenset(field.enum_type.values_by_number))
    if field.name in RANGES and field.cpp_type in NUMBERS:
        return _range_check(where, *RANGES[field.name])
    return None


def _needs_a_look(descriptor: Descriptor, seen: frozenset[str] = frozenset()) -> bool:
    if descriptor.full_name in seen:
        return False
    seen |= {descriptor.full_name}
    return any(
        field.is_repeated
        or field.type == FieldDescriptor.TYPE_STRING
        or field.enum_type is not None
        or (field.name in RANGES and field.cpp_type in NUMBERS)
        or (field.message_type is not None and _needs_a_look(field.message_type, seen))
        for field in descriptor.fields
    )


def _each(check: _Check) -> _Check:
    def check_each(values: Any) -> None:
        for value in values:
            check(value)

    return check_each


def _map_check(check: _Check) -> _Check:
    def check_map(entries: Any) -> None:
        for key, value in entries.items():
            check(key)
            check(value)

    return check_map


def _count_check(where: str, count_max: int) -> _Check:
    def check(values: Any) -> None:
        if len(values) > count_max:
            raise JobRejected(
                f"{where} has {len(values):,} entries; one message may have {count_max:,}"
            )

    return check


def _text_check(where: str, length_max: int) -> _Check:
    def check(text: str) -> None:
        if len(text) > length_max:
            raise JobRejected(
                f"{where} is {len(text):,} characters long, beginning with {text[:40]!r}; at most "
                f"{length_max:,} are taken"
            )

    return check


def _range_check(where: str, smallest: int, largest: int) -> _Check:
    def check(value: int) -> None:
        if not smallest <= value <= largest:
            raise JobRejected(f"{where} is {value}: it must be from {smallest:,} to {largest:,}")

    return check


def _constant_check(where: str, known: frozenset[int]) -> _Check:
    def check(value: int) -> None:
        if value not in known:
            raise JobRejected(
                f"{where} has the unknown value {value}: the two sides are of different versions, or "
                "the sender is not Penstock"
            )

    return check
