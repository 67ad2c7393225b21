"""Keys of daemons: JobManager, TaskManager with its disks and its network, liveness, security, logs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from penstock.config.value_types import DEADLINE_MAX_MS, DurationMs, MetricsPort, Port, SizeBytes


class DaemonKeys(BaseModel):
    """See the module."""

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
        description="Interface the JobManager listens on; leaving loopback needs a token of yours, or certificates.",
    )
    jobmanager_id: str = Field(
        "1",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        coerce_numbers_to_str=True,
        alias="jobmanager.id",
        description="Tells JobManagers apart that have one directory.",
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
        le=1_000_000,
        alias="jobmanager.exception-history-size",
        description="Failures of a job that stay visible, the newest.",
    )
    jobmanager_failure_enrichers: str = Field(
        "",
        alias="jobmanager.failure-enrichers",
        description="What labels failures, in the JobManager's environment: names of entry points, or `module:Class`, separated by commas.",
    )
    traces_reporter_type: Literal["none", "otel"] = Field(
        "none",
        alias="traces.reporter.type",
        description="Where the JobManager sends traces of checkpoints, savepoints, starts, takeovers and restarts: `otel`, to a collector that speaks OTLP over HTTP (needs `penstock[otel]`), or nowhere.",
    )
    traces_endpoint: str = Field(
        "http://127.0.0.1:4318/v1/traces",
        alias="traces.reporter.otel.exporter.endpoint",
        description="Address of the collector, with its path.",
    )
    traces_timeout_ms: DurationMs = Field(
        10_000,
        ge=1,
        alias="traces.reporter.otel.exporter.timeout",
        description="Time for one batch of spans, repetitions included; then they are dropped.",
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
        description="Interface the TaskManager and its slots listen on; leaving loopback needs a token of yours, or certificates.",
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
    taskmanager_spill_shared_dir: str = Field(
        "",
        alias="taskmanager.spill.shared-dir",
        description="Storage that all machines see, a mounted directory or `s3://bucket/prefix`, for rows of blocking "
        "exchanges: what is complete there needs no TaskManager any more. The JobManager tells TaskManagers; empty: "
        "each keeps its own on its disk.",
    )
    taskmanager_spill_shared_timeout_ms: DurationMs = Field(
        180_000,
        alias="taskmanager.spill.shared-timeout",
        description="How long one file may take there and back, with all that `s3.retry.timeout` allows for; then the task "
        "that writes it fails, and one that reads it asks again.",
    )
    taskmanager_spill_format: Literal["arrow", "parquet"] = Field(
        "arrow",
        alias="taskmanager.spill.format",
        description="Format of spilled rows: `arrow` is faster, `parquet` smaller. What Parquet cannot hold exactly is "
        "written as Arrow.",
    )
    taskmanager_spill_blocking_format: Literal["", "arrow", "parquet"] = Field(
        "",
        alias="taskmanager.spill.blocking-format",
        description="That of blocking exchanges; empty: as `taskmanager.spill.format`.",
    )
    taskmanager_spill_caching_format: Literal["", "arrow", "parquet"] = Field(
        "",
        alias="taskmanager.spill.caching-format",
        description="That of caching exchanges; empty: as `taskmanager.spill.format`.",
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
        1 << 20,
        ge=1024,
        alias="taskmanager.network.credit-per-channel",
        description="Bytes that may be under way or unread per channel of an exchange; more where an input has few "
        "channels: twice as many of its only one, up to eight times as many through gateways.",
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
        le=DEADLINE_MAX_MS,
        alias="heartbeat.timeout",
        description="A peer that is silent for longer is lost.",
    )
    taskmanager_jobmanager_grace_ms: DurationMs | None = Field(
        None,
        alias="taskmanager.jobmanager-grace",
        description="How long a TaskManager keeps what it runs and holds after its JobManager has been "
        "silent for heartbeat.timeout. By default 30 s, and 5 min where its own high-availability.type is zookeeper.",
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
        le=DEADLINE_MAX_MS,
        alias="rpc.timeout",
        description="Deadline of a call between client and daemons.",
    )

    # -- security and logs
    security_token_file: str = Field(
        "",
        alias="security.token-file",
        description="File with the secret that clients and daemons share; no other user may be able to read it. It may hold several, "
        "one a line, while it is exchanged: the first one is shown, all are accepted. "
        "Empty: `PENSTOCK_TOKEN`, else, on loopback, a secret that the JobManager makes for its own user.",
    )
    security_open_loopback: bool = Field(
        False,
        alias="security.open-loopback",
        description="Take calls without a token on loopback: every user of the machine can then run code as "
        "the daemons' user.",
    )
    security_ssl_internal_enabled: bool = Field(
        False,
        alias="security.ssl.internal.enabled",
        description="Daemons speak TLS with each other, and both sides show a certificate. It takes the token's place between them.",
    )
    security_ssl_internal_cert: str = Field(
        "",
        alias="security.ssl.internal.cert",
        description="PEM file with the daemon's certificate, and what lies between it and its CA.",
    )
    security_ssl_internal_key: str = Field(
        "",
        alias="security.ssl.internal.key",
        description="PEM file with its key; no other user may be able to read it.",
    )
    security_ssl_internal_ca: str = Field(
        "",
        alias="security.ssl.internal.ca",
        description="PEM file with the CAs whose certificates are peers, several while they are exchanged.",
    )
    security_ssl_client_enabled: bool = Field(
        False,
        alias="security.ssl.client.enabled",
        description="Clients speak TLS with the JobManager: set it there, and for each client.",
    )
    security_ssl_client_ca: str = Field(
        "",
        alias="security.ssl.client.ca",
        description="PEM file with the CAs that clients accept for the JobManager's certificate; empty: security.ssl.internal.ca.",
    )
    security_ssl_verify_hostname: bool = Field(
        True,
        alias="security.ssl.verify-hostname",
        description="A certificate must be for the host name or address that was asked for; false: any certificate of the CA will do.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", alias="log.level", description="Least severe level that is logged."
    )
