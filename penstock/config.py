"""The configuration model: every key, its type, default and meaning, in one place.

Keys follow Flink's names where the meaning is the same. A value comes from ``penstock.yaml``,
``-D key=value`` or ``Environment(config={...})``; an unknown key is an error that names the nearest
known one. ``docs/configuration.md`` is generated from this file (``make docs``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from penstock.errors import ConfigurationError
from penstock.storage.s3.settings import PART_BYTES_MAX, PART_BYTES_MIN, S3Settings
from penstock.units import duration_ms, size_bytes

_INFINITE = -1


def _duration(value: object) -> object:
    if isinstance(value, (str, int, float, timedelta)):
        return _as_value_error(duration_ms, value)
    return value


def _size(value: object) -> object:
    return _as_value_error(size_bytes, value) if isinstance(value, (str, int, float)) else value


def _count_or_infinite(value: object, parse: ValidatorFunctionWrapHandler) -> int:
    if value in ("infinite", "unlimited"):
        return _INFINITE
    count: int = parse(value)
    if count < 0:
        raise ValueError("is a number of at least 0, or `infinite` for no limit")
    return count


def _count_text(count: int) -> int | str:
    return "infinite" if count == _INFINITE else count


def _strategy_name(value: object) -> object:
    if value is False:
        return "off"  # YAML reads a plain off as false
    return value.strip().lower() if isinstance(value, str) else value


def _none_as_zero(value: object) -> object:
    return 0 if value is False or value in ("none", "off", "disabled") else value


def _pre_aggregation(value: object) -> object:
    named = {True: "always", False: "never", "true": "always", "false": "never"}
    return named.get(value, value) if isinstance(value, (bool, str)) else value


def _as_value_error(parse: Any, value: object) -> object:
    try:
        return parse(value)
    except ConfigurationError as error:
        raise ValueError(str(error)) from error


DurationMs = Annotated[
    int, BeforeValidator(_duration), Field(json_schema_extra={"type": "duration"})
]
IntervalMs = Annotated[DurationMs, BeforeValidator(_none_as_zero)]
"""A duration, or ``none`` (0)."""
SizeBytes = Annotated[int, BeforeValidator(_size), Field(json_schema_extra={"type": "size"})]
RestartStrategyType = Literal[
    "none",
    "off",
    "disable",
    "fallback",
    "fixed-delay",
    "fixeddelay",
    "failure-rate",
    "failurerate",
    "exponential-delay",
    "exponentialdelay",
]
_TYPES_WITH_EXPONENTIAL_DELAY = (None, "fallback", "exponential-delay", "exponentialdelay")
Count = Annotated[int, WrapValidator(_count_or_infinite), PlainSerializer(_count_text)]
"""A number from 0 on, or ``infinite`` (-1 in here, and refused from outside)."""
Port = Annotated[int, Field(ge=0, le=65535)]
MetricsPort = Annotated[int, Field(ge=-1, le=65535)]


_DEADLINE_MAX_MS = 10 * 366 * 86_400_000
"""Ten years: gRPC takes a deadline some centuries ahead for one that is over."""

SECRET_KEYS = {"s3.access-key": "AWS_ACCESS_KEY_ID", "s3.secret-key": "AWS_SECRET_ACCESS_KEY"}
"""Keys whose values are shown nowhere, with the environment variable that says the same to the client library."""

DEFAULT_CHECKPOINT_INTERVAL_MS = 10_000
"""Committing sinks need checkpoints: in streaming mode they are on unless they are turned off."""


class Configuration(BaseModel):
    """All settings of a cluster and of a job. Durations are milliseconds, sizes bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=False)

    # -- jobs
    parallelism_default: int = Field(
        1,
        ge=1,
        le=32768,
        alias="parallelism.default",
        description="Parallelism of operators that set none.",
    )
    pipeline_max_parallelism: int = Field(
        0,
        ge=0,
        le=32768,
        alias="pipeline.max-parallelism",
        description="Number of key-groups of operators that set none; 0 derives it from the parallelism.",
    )
    pipeline_auto_generate_uids: bool = Field(
        True,
        alias="pipeline.auto-generate-uids",
        description="Derive the uid of an operator without `.uid(...)` from its place in the graph; false refuses such jobs.",
    )
    pipeline_operator_chaining: bool = Field(
        True,
        alias="pipeline.operator-chaining.enabled",
        description="Run neighbouring operators of equal parallelism in one chain, without an exchange.",
    )
    batch_rows: int = Field(
        8192, ge=1, le=1 << 20, alias="execution.batch-rows", description="Rows of a full batch."
    )
    buffer_timeout_ms: DurationMs = Field(
        100,
        alias="execution.buffer-timeout.interval",
        description="How long a batch that is not full waits at most in front of an exchange while its sender is busy.",
    )
    auto_watermark_interval_ms: DurationMs = Field(
        50,
        alias="pipeline.auto-watermark-interval",
        description="Time between two watermarks of a source that is busy; an idle one sends its own at once.",
    )
    pre_aggregation: Annotated[
        Literal["auto", "always", "never"], BeforeValidator(_pre_aggregation)
    ] = Field(
        "auto",
        alias="execution.pre-aggregation",
        description="Aggregate in front of a keyed exchange where the aggregates allow it; `auto` does not where consumers could go on without it, and not with it, when their producer restarts. `true` is `always`, `false` is `never`.",
    )
    default_exchange: Literal["pipelined", "blocking", "caching", "caching-memory"] = Field(
        "pipelined",
        alias="execution.exchange.default",
        description="Type of exchanges (`key_by`, `rebalance`, `rescale`, `broadcast`) behind operators without `.exchange(...)`, in streaming mode.",
    )
    runtime_mode: Literal["streaming", "batch"] = Field(
        "streaming",
        alias="execution.runtime-mode",
        description="`streaming` runs all operators at once; `batch`, for bounded sources only, one stage after the other with blocking exchanges between them.",
    )
    batch_speculative: bool = Field(
        False,
        alias="execution.batch.speculative.enabled",
        description="In batch mode start a second attempt of a subtask that is much slower than the others of its vertex, on another TaskManager that has a free slot; the one that is done first counts. Code with side effects may have them twice.",
    )
    slow_task_check_interval_ms: DurationMs = Field(
        1000,
        ge=1,
        alias="slow-task-detector.check-interval",
        description="Time between two looks for slow subtasks.",
    )
    slow_task_baseline_lower_bound_ms: DurationMs = Field(
        60_000,
        alias="slow-task-detector.execution-time.baseline-lower-bound",
        description="A subtask that has run for less is not slow.",
    )
    slow_task_baseline_ratio: float = Field(
        0.75,
        ge=0,
        lt=1,
        alias="slow-task-detector.execution-time.baseline-ratio",
        description="Part of a vertex' subtasks that must be done before the others can be slow.",
    )
    slow_task_baseline_multiplier: float = Field(
        1.5,
        gt=0,
        alias="slow-task-detector.execution-time.baseline-multiplier",
        description="A subtask is slow when it has run for so many times the median of those that are done.",
    )
    pipeline_deterministic: bool = Field(
        False,
        alias="pipeline.deterministic",
        description="Declare all Python functions and sources of a job deterministic, as `.deterministic(True)` does one.",
    )

    # -- checkpoints
    execution_checkpointing_interval_ms: IntervalMs | None = Field(
        None,
        alias="execution.checkpointing.interval",
        description="Time between the starts of two checkpoints; `none` takes none, and output is committed when the job has finished. By default 10 s, and `none` in batch mode.",
    )
    execution_checkpointing_mode: Literal["exactly-once", "at-least-once"] = Field(
        "exactly-once", alias="execution.checkpointing.mode", description="Guarantee of the state."
    )
    execution_checkpointing_timeout_ms: DurationMs = Field(
        600_000,
        alias="execution.checkpointing.timeout",
        description="A checkpoint that takes longer is aborted. As long, but at least 2 min, a restore may go without reading anything before its task fails and is restarted.",
    )
    execution_checkpointing_min_pause_ms: DurationMs = Field(
        0,
        alias="execution.checkpointing.min-pause",
        description="Time between the end of a checkpoint and the start of the next.",
    )
    execution_checkpointing_max_concurrent: int = Field(
        1,
        ge=1,
        alias="execution.checkpointing.max-concurrent-checkpoints",
        description="Checkpoints under way at once.",
    )
    execution_checkpointing_tolerable_failed: Count = Field(
        -1,
        alias="execution.checkpointing.tolerable-failed-checkpoints",
        description="Checkpoints that may fail in a row before the job does.",
    )
    execution_checkpointing_storage: Literal["jobmanager", "filesystem"] = Field(
        "filesystem",
        alias="execution.checkpointing.storage",
        description="Where checkpoints are kept.",
    )
    execution_checkpointing_dir: str = Field(
        "", alias="execution.checkpointing.dir", description="Root directory of the checkpoints."
    )
    execution_checkpointing_savepoint_dir: str = Field(
        "",
        alias="execution.checkpointing.savepoint-dir",
        description="Directory in which savepoints are made where nobody names another.",
    )
    execution_checkpointing_jobmanager_max_bytes: SizeBytes = Field(
        5 * 1024 * 1024,
        alias="execution.checkpointing.jobmanager.max-size",
        description="Size of all retained checkpoints of a job in storage `jobmanager`.",
    )
    execution_checkpointing_incremental: bool = Field(
        True, alias="execution.checkpointing.incremental", description="Upload only what changed."
    )
    execution_checkpointing_num_retained: int = Field(
        1,
        ge=1,
        alias="execution.checkpointing.num-retained",
        description="Completed checkpoints to keep.",
    )
    execution_checkpointing_retention: Literal[
        "DELETE_ON_CANCELLATION", "RETAIN_ON_CANCELLATION"
    ] = Field(
        "DELETE_ON_CANCELLATION",
        alias="execution.checkpointing.externalized-checkpoint-retention",
        description="Whether the checkpoints of a job that is cancelled stay, so that it can be started from them again; those of a job that has failed always do.",
    )
    execution_checkpointing_unaligned: bool = Field(
        False,
        alias="execution.checkpointing.unaligned.enabled",
        description="Let barriers overtake rows.",
    )
    execution_checkpointing_local_backup: bool | None = Field(
        None,
        alias="execution.checkpointing.local-backup.enabled",
        description="Also write snapshots to the TaskManager's own disk; not set: as `execution.state-recovery.from-local`.",
    )
    execution_checkpointing_local_backup_dirs: str = Field(
        "",
        alias="execution.checkpointing.local-backup.dirs",
        description="Directories of these copies, separated by commas, apart from the spill directory (neither within the other); empty: `local-state` next to the TaskManager's work directory.",
    )
    execution_state_recovery_from_local: bool = Field(
        False,
        alias="execution.state-recovery.from-local",
        description="Restore from local copies where they are undamaged.",
    )

    execution_state_recovery_path: str = Field(
        "",
        alias="execution.state-recovery.path",
        description="What a job starts from: a savepoint, the directory of another job's checkpoints or one `chk-<n>` in it.",
    )
    execution_state_recovery_claim_mode: Literal["no-claim", "claim"] = Field(
        "no-claim",
        alias="execution.state-recovery.claim-mode",
        description="`no-claim`: what the job starts from is left alone, and not needed any more from its first own checkpoint on; `claim`: it belongs to the job, which removes what it needs no more.",
    )
    execution_state_recovery_ignore_unclaimed: bool = Field(
        False,
        alias="execution.state-recovery.ignore-unclaimed-state",
        description="Leave out state of operators that the job does not have; else it is refused.",
    )
    execution_state_recovery_in_doubt: Literal["commit", "leave"] | None = Field(
        None,
        alias="execution.state-recovery.in-doubt",
        description="What becomes of output that a savepoint covers and of which nobody knows whether it was committed: the job commits it, or leaves it; not set: such a savepoint is refused.",
    )

    # -- S3
    s3_endpoint: str = Field(
        "",
        alias="s3.endpoint",
        description="Address of the server, `http://host:port` or `https://...`; empty: AWS, in the region.",
    )
    s3_region: str = Field(
        "", alias="s3.region", description="Region; empty: as the environment or `~/.aws` says."
    )
    s3_path_style_access: bool = Field(
        False,
        alias="s3.path-style-access",
        description="Name the bucket in the path and not in the host, as most servers but AWS need it.",
    )
    s3_access_key: str = Field(
        "",
        alias="s3.access-key",
        repr=False,
        description="Access key; empty: the usual chain of environment, `~/.aws` and the role of the machine.",
    )
    s3_secret_key: str = Field(
        "",
        alias="s3.secret-key",
        repr=False,
        description="Secret key that belongs to `s3.access-key`.",
    )
    s3_request_timeout_ms: DurationMs = Field(
        30_000,
        ge=1,
        alias="s3.request.timeout",
        description="Time to connect, and for each silence of the server, after which a request is repeated.",
    )
    s3_retry_timeout_ms: DurationMs = Field(
        120_000,
        ge=1,
        alias="s3.retry.timeout",
        description="Deadline of a request with all its repetitions.",
    )
    s3_upload_part_bytes: SizeBytes = Field(
        16 * 1024 * 1024,
        ge=PART_BYTES_MIN,
        le=PART_BYTES_MAX,
        alias="s3.upload.part-size",
        description="Size of the parts that larger objects are written in; 10,000 at most make an object.",
    )
    s3_upload_memory_bytes: SizeBytes = Field(
        64 * 1024 * 1024,
        ge=PART_BYTES_MIN,
        alias="s3.upload.memory",
        description="Memory for the parts of all uploads of a slot, or of another process; at least one part.",
    )
    s3_checksums: Literal["when_required", "when_supported"] = Field(
        "when_required",
        alias="s3.checksums",
        description="When the client adds the newer checksum headers, which older servers refuse; Penstock's own checksums are always checked.",
    )

    # -- state
    state_backend_type: Literal["hashmap", "rocksdb"] = Field(
        "hashmap", alias="state.backend.type", description="Where working state lives."
    )
    state_inline_max_bytes: SizeBytes = Field(
        20 * 1024,
        alias="state.storage.fs.memory-threshold",
        description="State up to this size is kept in the checkpoint's manifest.",
    )

    # -- restarts
    restart_strategy_type: Annotated[
        RestartStrategyType | None, BeforeValidator(_strategy_name)
    ] = Field(
        None,
        alias="restart-strategy.type",
        description="When a failed job is restarted; `fallback`: as the cluster says. By default `exponential-delay` with checkpoints, `none` without; and where neither this nor `execution.checkpointing.interval` is set by anybody, failures of user code or data end the job, all others restart it.",
    )
    restart_strategy_fixed_delay_attempts: Count = Field(
        1,
        alias="restart-strategy.fixed-delay.attempts",
        description="Restarts before the job fails; `infinite` for no limit.",
    )
    restart_strategy_fixed_delay_delay_ms: DurationMs = Field(
        1000,
        alias="restart-strategy.fixed-delay.delay",
        description="Time between failure and restart.",
    )
    restart_strategy_exponential_delay_initial_backoff_ms: DurationMs = Field(
        1000, alias="restart-strategy.exponential-delay.initial-backoff", description="First delay."
    )
    restart_strategy_exponential_delay_max_backoff_ms: DurationMs = Field(
        60_000, alias="restart-strategy.exponential-delay.max-backoff", description="Longest delay."
    )
    restart_strategy_exponential_delay_backoff_multiplier: float = Field(
        1.5,
        ge=1,
        allow_inf_nan=False,
        alias="restart-strategy.exponential-delay.backoff-multiplier",
        description="Growth of the delay per failure.",
    )
    restart_strategy_exponential_delay_reset_backoff_threshold_ms: DurationMs = Field(
        3_600_000,
        ge=1,
        alias="restart-strategy.exponential-delay.reset-backoff-threshold",
        description="Time without a failure, since the last delay was over, after which the delay is the first again.",
    )
    restart_strategy_exponential_delay_jitter_factor: float = Field(
        0.1,
        ge=0,
        le=1,
        alias="restart-strategy.exponential-delay.jitter-factor",
        description="Random part of the delay that is added or subtracted.",
    )
    restart_strategy_exponential_delay_attempts: Count = Field(
        -1,
        alias="restart-strategy.exponential-delay.attempts-before-reset-backoff",
        description="Restarts before the job fails, counted since the last reset.",
    )
    restart_strategy_failure_rate_delay_ms: DurationMs = Field(
        1000,
        alias="restart-strategy.failure-rate.delay",
        description="Time between failure and restart.",
    )
    restart_strategy_failure_rate_interval_ms: DurationMs = Field(
        60_000,
        ge=1,
        alias="restart-strategy.failure-rate.failure-rate-interval",
        description="Interval the rate is measured over.",
    )
    restart_strategy_failure_rate_max_failures: int = Field(
        1,
        ge=1,
        alias="restart-strategy.failure-rate.max-failures-per-interval",
        description="Restarts in the interval before the job fails.",
    )
    restart_strategy_max_failures_per_task: Count = Field(
        -1,
        alias="restart-strategy.max-failures-per-task",
        description="Failures of one subtask that are restarted, under every strategy; the next fails the job.",
    )
    restart_strategy_max_failures_total: Count = Field(
        -1,
        alias="restart-strategy.max-failures-total",
        description="Failures of a job that are restarted, under every strategy; the next fails it.",
    )

    # -- JobManager
    jobmanager_rpc_address: str = Field(
        "127.0.0.1",
        alias="jobmanager.rpc.address",
        description="Host under which the JobManager is reached.",
    )
    jobmanager_rpc_port: Port = Field(
        6123, alias="jobmanager.rpc.port", description="Port of the JobManager; 0 takes a free one."
    )
    jobmanager_bind_host: str = Field(
        "127.0.0.1",
        alias="jobmanager.bind-host",
        description="Interface the JobManager listens on; leaving loopback needs a token of yours.",
    )
    jobmanager_metrics_port: MetricsPort = Field(
        0,
        alias="jobmanager.metrics.port",
        description="Port of Prometheus' endpoint; 0 takes a free one, -1 is off.",
    )
    jobmanager_taskmanagers_max: int = Field(
        1000,
        ge=1,
        alias="jobmanager.taskmanagers.max",
        description="TaskManagers that may be registered at a time; one more is refused, and ends.",
    )
    jobmanager_retained_jobs: int = Field(
        100, ge=1, alias="jobmanager.retained-jobs", description="Ended jobs that stay visible."
    )
    jobmanager_exception_history_size: int = Field(
        16,
        ge=1,
        alias="jobmanager.exception-history-size",
        description="Failures of a job that stay visible, the newest.",
    )
    jobmanager_failure_enrichers: str = Field(
        "",
        alias="jobmanager.failure-enrichers",
        description="What labels failures, in the JobManager's environment: names of entry points, or `module:Class`, separated by commas.",
    )
    failover_strategy: Literal["full", "region", "individual"] = Field(
        "region",
        alias="jobmanager.execution.failover-strategy",
        description="What a failure restarts: the whole job, the regions that it touches, or, where that is sound, the failed task alone.",
    )
    jobmanager_storage_dir: str = Field(
        "",
        alias="jobmanager.storage.dir",
        description="Where artifacts are kept; by default in the daemon's directory.",
    )

    # -- TaskManager
    taskmanager_id: str = Field(
        "",
        alias="taskmanager.id",
        description="Stable name of a TaskManager; by default one is made up at each start.",
    )
    taskmanager_host: str = Field(
        "127.0.0.1",
        alias="taskmanager.host",
        description="Host under which the TaskManager is reached.",
    )
    taskmanager_bind_host: str = Field(
        "127.0.0.1",
        alias="taskmanager.bind-host",
        description="Interface the TaskManager and its slots listen on; leaving loopback needs a token of yours.",
    )
    taskmanager_rpc_port: Port = Field(
        0, alias="taskmanager.rpc.port", description="Port of the TaskManager; 0 takes a free one."
    )
    taskmanager_data_port: Port = Field(
        0,
        alias="taskmanager.data.port",
        description="Port on which a slot takes data from other hosts; 0 takes a free one for each slot.",
    )
    taskmanager_metrics_port: MetricsPort = Field(
        0,
        alias="taskmanager.metrics.port",
        description="Port of Prometheus' endpoint; 0 takes a free one, -1 is off.",
    )
    taskmanager_logs_max_bytes: SizeBytes = Field(
        1 << 30,
        ge=1 << 20,
        alias="taskmanager.logs.max-size",
        description="Size of all logs of a TaskManager and of the jobs on it; the oldest go first.",
    )
    jobmanager_logs_max_bytes: SizeBytes = Field(
        256 << 20,
        ge=1 << 20,
        alias="jobmanager.logs.max-size",
        description="Size of the JobManager's logs; the oldest lines go first.",
    )
    taskmanager_slots: int = Field(
        2,
        ge=1,
        le=1024,
        alias="taskmanager.numberOfTaskSlots",
        description="Slots, each a process of its own.",
    )
    taskmanager_memory_managed_bytes: SizeBytes = Field(
        1 << 30, alias="taskmanager.memory.managed.size", description="Memory for state, per slot."
    )
    # -- exchange: partitions that keep their rows
    taskmanager_memory_exchange_cache_bytes: SizeBytes = Field(
        256 << 20,
        ge=1,
        alias="taskmanager.memory.exchange-cache.size",
        description="Memory for rows that exchanges keep (blocking, caching), per slot; what does not fit is spilled.",
    )
    taskmanager_local_state_retention_ms: DurationMs = Field(
        3_600_000,
        alias="taskmanager.local-state.retention",
        description="How long local copies of snapshots are kept whose subtask completes no checkpoint there.",
    )
    taskmanager_spill_dir: str = Field(
        "",
        alias="taskmanager.spill.dir",
        description="Directory for spilled rows of exchanges; empty: in the TaskManager's work directory.",
    )
    taskmanager_spill_max_bytes: SizeBytes = Field(
        0,
        ge=0,
        alias="taskmanager.spill.max-size",
        description="Spilled rows per slot beyond which producers wait, and blocking exchanges fail; 0: no limit.",
    )
    taskmanager_spill_min_free_bytes: SizeBytes = Field(
        256 << 20,
        alias="taskmanager.spill.min-free",
        description="Free space on the disk of the spill directory below which nothing more is written to "
        "it: whose memory is full waits.",
    )
    taskmanager_spill_hard_min_free_bytes: SizeBytes = Field(
        64 << 20,
        alias="taskmanager.spill.hard-min-free",
        description="Free space on that disk below which the TaskManager removes its spill directory and "
        "ends.",
    )
    taskmanager_spill_wait_timeout_ms: DurationMs = Field(
        60_000,
        alias="taskmanager.spill.wait-timeout",
        description="How long blocking exchanges wait for space on that disk before they fail; caching ones drop what "
        "their consumers have read, and wait for those that have not.",
    )
    taskmanager_partitions_grace_ms: DurationMs = Field(
        60_000,
        alias="taskmanager.partitions.grace",
        description="How long a TaskManager keeps complete result partitions after it has given its "
        "JobManager up.",
    )

    # -- network
    taskmanager_local_sockets: bool = Field(
        True,
        alias="taskmanager.network.local-sockets",
        description="Exchange data over Unix sockets where both slots are on one host.",
    )
    network_credit_bytes: SizeBytes = Field(
        2 << 20,
        ge=1024,
        alias="taskmanager.network.credit-per-channel",
        description="Bytes that may be under way or unread per channel of an exchange.",
    )
    print_to_terminal: bool = Field(
        False,
        alias="taskmanager.print-to-terminal",
        description="Write what user code and print sinks print to the daemon's terminal as well.",
    )

    # -- liveness and deadlines
    heartbeat_interval_ms: DurationMs = Field(
        1000,
        ge=10,
        alias="heartbeat.interval",
        description="Time between two heartbeats of a TaskManager.",
    )
    heartbeat_timeout_ms: DurationMs = Field(
        10_000,
        ge=50,
        le=_DEADLINE_MAX_MS,
        alias="heartbeat.timeout",
        description="A peer that is silent for longer is lost.",
    )
    taskmanager_jobmanager_grace_ms: DurationMs = Field(
        30_000,
        alias="taskmanager.jobmanager-grace",
        description="How long a TaskManager keeps what it runs and holds after its JobManager has been "
        "silent for heartbeat.timeout.",
    )
    slot_request_timeout_ms: DurationMs = Field(
        60_000,
        alias="slot.request.timeout",
        description="How long a job waits for free slots before it fails.",
    )
    task_cancellation_timeout_ms: DurationMs = Field(
        30_000,
        alias="task.cancellation.timeout",
        description="How long a cancelled task may take before its slot process is killed.",
    )
    rpc_timeout_ms: DurationMs = Field(
        10_000,
        ge=100,
        le=_DEADLINE_MAX_MS,
        alias="rpc.timeout",
        description="Deadline of a call between client and daemons.",
    )

    # -- security and logs
    security_token_file: str = Field(
        "",
        alias="security.token-file",
        description="File with the secret that clients and daemons share; no other user may be able to read it. "
        "Empty: `PENSTOCK_TOKEN`, else, on loopback, a secret that the JobManager makes for its own user.",
    )
    security_open_loopback: bool = Field(
        False,
        alias="security.open-loopback",
        description="Take calls without a token on loopback: every user of the machine can then run code as "
        "the daemons' user.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", alias="log.level", description="Least severe level that is logged."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Python takes True for 1."""
        is_number = cls.model_fields[str(info.field_name)].annotation in (int, float)
        if is_number and isinstance(value, bool):
            raise ValueError("is a number, not true or false")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heartbeat_timeout_ms <= self.heartbeat_interval_ms:
            raise ValueError("heartbeat.timeout must be longer than heartbeat.interval")
        if self.taskmanager_spill_hard_min_free_bytes > self.taskmanager_spill_min_free_bytes:
            raise ValueError(
                "taskmanager.spill.hard-min-free must not be more than taskmanager.spill.min-free"
            )
        if bool(self.s3_access_key) != bool(self.s3_secret_key):
            raise ValueError(
                "s3.access-key and s3.secret-key belong together: set both, or neither"
            )
        return self

    def check_for_daemons(self) -> None:
        """Checks what values say together where daemons use them: jobs bring only a part of them.

        Raises:
            ConfigurationError: two values contradict each other.
        """
        if self.restart_strategy_type in _TYPES_WITH_EXPONENTIAL_DELAY:
            self.check_exponential_delay()
        if self.taskmanager_spill_dir:
            self._check_copies_are_apart(Path(self.taskmanager_spill_dir))

    def _check_copies_are_apart(self, spill: Path) -> None:
        for copies in self.local_backup_directories:
            one, other = copies.resolve(), spill.resolve()
            if one.is_relative_to(other) or other.is_relative_to(one):
                raise ConfigurationError(
                    f"execution.checkpointing.local-backup.dirs ({copies}) and taskmanager.spill.dir "
                    f"({spill}) must not be the same or within each other; change one of them"
                )

    def check_exponential_delay(self) -> None:
        """Checks what the numbers of the exponential delay say together.

        Raises:
            ConfigurationError: the longest delay is shorter than the first.
        """
        prefix = "restart-strategy.exponential-delay."
        initial_ms = self.restart_strategy_exponential_delay_initial_backoff_ms
        max_ms = self.restart_strategy_exponential_delay_max_backoff_ms
        if max_ms < initial_ms:
            raise ConfigurationError(
                f"{prefix}max-backoff ({max_ms} ms) is shorter than {prefix}initial-backoff "
                f"({initial_ms} ms): the longest delay cannot be shorter than the first; change one of them"
            )

    @property
    def writes_local_copies(self) -> bool:
        """Whether snapshots are also written to the TaskManager's own disk."""
        if self.execution_checkpointing_local_backup is None:
            return self.execution_state_recovery_from_local
        return self.execution_checkpointing_local_backup

    @property
    def local_backup_directories(self) -> list[Path]:
        """Where these copies are; [] = where the TaskManager chooses."""
        parts = self.execution_checkpointing_local_backup_dirs.split(",")
        return [Path(part.strip()).absolute() for part in parts if part.strip()]

    @property
    def s3(self) -> S3Settings:
        """How a process with this configuration reaches S3."""
        return S3Settings(
            self.s3_endpoint,
            self.s3_region,
            self.s3_path_style_access,
            self.s3_access_key,
            self.s3_secret_key,
            self.s3_request_timeout_ms,
            self.s3_retry_timeout_ms,
            self.s3_upload_part_bytes,
            self.s3_upload_memory_bytes,
            self.s3_checksums,
        )

    @property
    def is_speculative(self) -> bool:
        """Whether slow subtasks may get a second attempt: batch jobs that take no checkpoints."""
        is_batch = self.runtime_mode == "batch" and self.checkpoint_interval_ms is None
        return self.batch_speculative and is_batch

    @property
    def checkpoint_interval_ms(self) -> int | None:
        """Time between the starts of two checkpoints, None = checkpointing is off."""
        if self.execution_checkpointing_interval_ms is None:
            return None if self.runtime_mode == "batch" else DEFAULT_CHECKPOINT_INTERVAL_MS
        return self.execution_checkpointing_interval_ms or None

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Configuration:
        """A configuration from dotted keys; nested mappings are flattened.

        Raises:
            ConfigurationError: an unknown key or a wrong value, named.
        """
        flat = dict(_flatten("", values))
        for key in flat:
            if key not in _FIELD_BY_KEY:
                raise ConfigurationError(_unknown_key(key))
        try:
            return cls.model_validate(flat)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"][:1])
            reason = first["msg"].removeprefix("Value error, ")
            shown = "" if key in SECRET_KEYS else f" = {flat.get(key)!r}"
            where = f"{key}{shown}: " if key in flat else ""
            raise ConfigurationError(f"configuration {where}{reason}") from error

    @classmethod
    def load(
        cls, path: Path | None, overrides: Mapping[str, object] | None = None
    ) -> Configuration:
        """The configuration of a YAML file, if it exists, with overrides that win.

        Raises:
            ConfigurationError: the file cannot be read, or a key or value in it is wrong.
        """
        if path is None or not path.exists():
            return cls.from_mapping(overrides or {})
        in_file = read_yaml(path)
        try:
            return cls.from_mapping({**in_file, **dict(_flatten("", overrides or {}))})
        except ConfigurationError:
            cls.check_file(path, in_file)  # where the file alone is wrong, that is what to say
            raise

    @classmethod
    def check_file(cls, path: Path, values: Mapping[str, object]) -> None:
        """Checks what was read from a file.

        Raises:
            ConfigurationError: a key or a value is wrong; the message names the file.
        """
        try:
            cls.from_mapping(values)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from error

    def merged(self, overrides: Mapping[str, object]) -> Configuration:
        """This configuration with some keys replaced."""
        return self.from_mapping({**self.to_mapping(), **dict(_flatten("", overrides))})

    def with_restart_strategy(self, keys: Mapping[str, object]) -> Configuration:
        """This configuration with one restart strategy in place of another; limits on failures stay.

        Args:
            keys: those of the strategy.
        """
        kept = {
            key: value
            for key, value in self.to_mapping().items()
            if not is_of_restart_strategy(key)
        }
        return self.from_mapping({**kept, **keys})

    def of_job(self) -> dict[str, str]:
        """``to_mapping`` without what is a matter of each process, and may be secret: how it reaches S3."""
        return {key: value for key, value in self.to_mapping().items() if not key.startswith("s3.")}

    def to_mapping(self) -> dict[str, str]:
        """The keys that were set, as text: where it is merged, one that says the default counts too."""
        values = self.model_dump(exclude_unset=True, exclude_none=True)
        return {
            _KEY_BY_FIELD[name]: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in values.items()
        }


_KEY_BY_FIELD = {name: str(info.alias) for name, info in Configuration.model_fields.items()}
_FIELD_BY_KEY = {key: name for name, key in _KEY_BY_FIELD.items()}


_LIMITS_OF_FAILURES = (
    "restart-strategy.max-failures-per-task",
    "restart-strategy.max-failures-total",
)


def is_of_restart_strategy(key: str) -> bool:
    """Whether a key chooses a restart strategy or is one of its numbers; limits on failures are neither."""
    return key.startswith("restart-strategy.") and key not in _LIMITS_OF_FAILURES


def known_keys() -> list[str]:
    """Every configuration key."""
    return list(_FIELD_BY_KEY)


def read_yaml(path: Path) -> dict[str, object]:
    """The flat keys of a YAML file.

    Raises:
        ConfigurationError: the file cannot be read or is not a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must hold keys and values, not {type(content).__name__}")
    return dict(_flatten("", content))


def parse_override(text: str) -> tuple[str, str]:
    """The key and value of ``-D key=value``.

    Raises:
        ConfigurationError: there is no ``=``, or the key is unknown.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"-D {text}: write -D key=value")
    key = key.strip()
    if key not in _FIELD_BY_KEY:
        raise ConfigurationError(_unknown_key(key))
    return key, value.strip()


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key, _FIELD_BY_KEY, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown configuration key {key}{hint}"


def _flatten(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value
