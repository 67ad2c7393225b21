"""Keys of checkpoints and savepoints, and of S3, where they can be kept."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from penstock.config.value_types import Count, DurationMs, IntervalMs, SizeBytes
from penstock.storage.s3.settings import PART_BYTES_MAX, PART_BYTES_MIN


class CheckpointKeys(BaseModel):
    """See the module."""

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
        description="Where checkpoints are kept; `jobmanager`, its memory, is refused with `high-availability.type: zookeeper`.",
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
