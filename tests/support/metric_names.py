"""The metrics that daemons show, by name: live ones are compared with them, and so is all that names one."""

from __future__ import annotations

from typing import Final


def _named(prefix: str, names: str) -> frozenset[str]:
    return frozenset(f"penstock_{prefix}_{name}" for name in names.split())


_OF_SUBTASKS: Final = _named(
    "subtask",
    """
    records_in_total records_out_total in_bytes_total out_bytes_total busy_seconds_total
    idle_seconds_total back_pressured_seconds_total late_records_total bad_records_total
    watermark_timestamp_seconds restored_local_bytes_total restored_store_bytes_total
    local_backup_failures_total checkpoint_start_delay_seconds checkpoint_alignment_seconds
    checkpoint_in_flight_bytes checkpoint_sync_seconds checkpoint_async_seconds
    checkpoint_uploaded_bytes state_bytes watermark_lag_seconds in_queued_bytes
    in_credit_bytes out_waiting_batches state_memory_bytes rocksdb_memtable_bytes
    rocksdb_level0_files rocksdb_pending_compaction_bytes rocksdb_file_bytes
    rocksdb_block_cache_hits_total rocksdb_block_cache_misses_total
    """,
)
_OF_JOBS: Final = _named(
    "job",
    """
    restarts_total checkpoints_completed_total checkpoints_failed_total
    last_checkpoint_duration_seconds last_checkpoint_state_bytes
    last_checkpoint_uploaded_bytes last_checkpoint_in_flight_bytes
    last_checkpoint_start_delay_seconds last_checkpoint_alignment_seconds
    last_checkpoint_sync_seconds last_checkpoint_async_seconds work_at_risk_seconds
    region_restarts_total speculative_attempts_total speculative_attempts_won_total
    store_calls_given_up_total store_calls_hanging dropped_events_total
    output_repeated_total
    """,
)
_OF_STORES: Final = _named("s3", "requests_total sent_bytes_total received_bytes_total") | _named(
    "file_store", "requests_total written_bytes_total read_bytes_total"
)
OF_JOBMANAGER: Final = (
    _OF_SUBTASKS
    | _OF_JOBS
    | _OF_STORES
    | _named(
        "jobmanager",
        """
    jobs slots slots_free taskmanagers jobs_waiting_for_slots taskmanagers_lost_total
    held_partitions held_partitions_bytes dropped_events_total uptime_seconds leading
    leader_epoch leader_changes_total zookeeper_state swaps_total heartbeat_age_seconds
    older_token_calls_total
    """,
    )
)
OF_TASKMANAGER: Final = (
    _OF_SUBTASKS
    | _OF_STORES
    | _named(
        "taskmanager",
        """
    uptime_seconds heartbeat_age_seconds dropped_events slots slots_free forkserver_restarts
    gateway_restarts partition_server_restarts held_partitions spill_bytes spill_free_bytes
    spill_written_bytes_total spill_read_bytes_total spill_write_seconds_total
    spill_read_seconds_total older_token_calls_total
    """,
    )
)
WITH_TLS: Final = _named("jobmanager", "certificate_remaining_seconds") | _named(
    "taskmanager", "certificate_remaining_seconds"
)
"""Shown where calls are TLS."""
