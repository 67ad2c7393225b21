"""What a job's configuration says of its checkpoints and restarts, decided at submission.

Checkpointing is on by default. Where nobody has asked for it and there is no directory for checkpoints,
it is off with a warning; where somebody has, the job is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.failover.restart_settings import RestartSettings, restart_settings
from jobmanager.scheduler.slow_task_detector import SlowTaskSettings
from penstock.config import Configuration
from penstock.errors import JobRejected

_KEY = "execution.checkpointing.dir"


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How a job is to be run.

    Attributes:
        checkpoints: when they are taken; None = never.
        directory: root of the checkpoint store, "" = the JobManager's memory.
        memory_max_bytes: limit of the JobManager's memory for it.
        warning: for the log, "" = none.
        speculation: when subtasks are so slow that they get rivals; None = never.
        retains_on_cancellation: its checkpoints stay when it is cancelled.
    """

    restart: RestartSettings
    checkpoints: CheckpointSettings | None = None
    directory: str = ""
    memory_max_bytes: int = 0
    warning: str = ""
    speculation: SlowTaskSettings | None = None
    retains_on_cancellation: bool = False

    @property
    def begins_again(self) -> bool:
        """True when another JobManager can begin the job again, from its newest checkpoint or from nothing."""
        if self.checkpoints is None:
            return self.restart.restarts
        return bool(self.directory)

    @property
    def keeps_in_jobmanager(self) -> bool:
        """True when its checkpoints end with the JobManager."""
        return self.checkpoints is not None and not self.directory


def job_settings(config: Configuration) -> JobSettings:
    """The settings of a job.

    Args:
        config: in force for the job, see ``over_cluster``.

    Raises:
        JobRejected: they cannot be had.
    """
    warning = _why_off(config)
    interval_ms = config.checkpoint_interval_ms
    if interval_ms is None or warning:
        return JobSettings(
            restart_settings(config, takes_checkpoints=False),
            warning=warning,
            speculation=_speculation(config) if config.is_speculative else None,
        )
    if config.execution_checkpointing_unaligned:
        raise JobRejected(
            "execution.checkpointing.unaligned.enabled is not available in this version: leave it false"
        )
    is_on_disk = config.execution_checkpointing_storage == "filesystem"
    return JobSettings(
        restart=restart_settings(config, takes_checkpoints=True),
        checkpoints=CheckpointSettings(
            interval_ms=interval_ms,
            timeout_ms=config.execution_checkpointing_timeout_ms,
            min_pause_ms=config.execution_checkpointing_min_pause_ms,
            max_concurrent=config.execution_checkpointing_max_concurrent,
            tolerable_failed=config.execution_checkpointing_tolerable_failed,
            retained_max=config.execution_checkpointing_num_retained,
            is_incremental=config.execution_checkpointing_incremental,
        ),
        directory=config.execution_checkpointing_dir if is_on_disk else "",
        memory_max_bytes=config.execution_checkpointing_jobmanager_max_bytes,
        retains_on_cancellation=is_on_disk
        and config.execution_checkpointing_retention == "RETAIN_ON_CANCELLATION",
    )


def _speculation(config: Configuration) -> SlowTaskSettings:
    return SlowTaskSettings(
        check_interval_ms=config.slow_task_check_interval_ms,
        lower_bound_ms=config.slow_task_baseline_lower_bound_ms,
        ratio=config.slow_task_baseline_ratio,
        multiplier=config.slow_task_baseline_multiplier,
    )


def _why_off(config: Configuration) -> str:
    """Why checkpointing is off although nobody has turned it off; "" = it is on, or was turned off.

    Raises:
        JobRejected: it was asked for, and cannot be had.
    """
    if config.checkpoint_interval_ms is None:
        return ""
    directory = config.execution_checkpointing_dir
    if config.execution_checkpointing_storage != "filesystem":
        return ""
    if directory:
        if "://" not in directory and not PurePosixPath(directory).is_absolute():
            raise JobRejected(
                f"{_KEY} = {directory!r} must be an absolute path of a directory that the "
                "JobManager and every TaskManager share, or s3://bucket/prefix"
            )
        return ""
    if config.execution_checkpointing_interval_ms is not None:
        raise JobRejected(
            f"execution.checkpointing.interval is set, but {_KEY} is not: name a directory that the "
            "JobManager and every TaskManager share, or set execution.checkpointing.storage to "
            "'jobmanager'"
        )
    return (
        f"no checkpoints are taken because {_KEY} is not set: the job cannot be restarted from where "
        "it was"
    )
