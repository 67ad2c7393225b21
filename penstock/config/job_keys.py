"""Keys of jobs: how they are planned and run, where their state lives, how they restart."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from penstock.config.value_types import (
    Count,
    DurationMs,
    PreAggregation,
    RestartStrategy,
    SizeBytes,
)


class JobKeys(BaseModel):
    """See the module."""

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
    pre_aggregation: PreAggregation = Field(
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
    restart_strategy_type: RestartStrategy = Field(
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
