"""Keys of what runs on Spark: ours, and Spark's own, which are passed on as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import BaseModel, Field

from penstock.config.value_types import DurationMs, SizeBytes

SPARK_PREFIX = "spark."
SPARK_OWN_KEYS = "spark.*"
"""Stands for all keys that begin so."""

CASE_SENSITIVE = "spark.sql.caseSensitive"

PINNED = {
    "spark.sql.ansi.enabled": "true",
    CASE_SENSITIVE: "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.decimalOperations.allowPrecisionLoss": "true",
    "spark.sql.subexpressionElimination.skipForShortcutExpr": "true",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.variable.substitute": "false",
}
"""What a session must have for results of relational parts of jobs to be those of our engine."""

_SECRET = re.compile(r"secret|password|passphrase|token|access[.-]?key|credential", re.IGNORECASE)


class SparkKeys(BaseModel):
    """See the module."""

    spark_own: tuple[tuple[str, str], ...] | None = Field(
        None,
        alias=SPARK_OWN_KEYS,
        description="Every key of Spark's own is passed on to the session: `spark.master` (default: `local[n]`, n = the stage's `cores` or the TaskManager's slots), `spark.remote` for Spark Connect, `spark.sql.shuffle.partitions`, ... Secrets among them belong into the daemons' configuration.",
    )
    execution_spark_driver_memory_bytes: SizeBytes = Field(
        1 << 30,
        ge=450 << 20,
        alias="execution.spark.driver-memory",
        description="Heap of the JVM that a slot starts for its Spark stages; in local mode all of Spark's work is done in it. It comes on top of the slot's own memory.",
    )
    execution_spark_directory: str = Field(
        "",
        alias="execution.spark.directory",
        description="Directory that takes input and output of Spark stages while they run. By default the slot's own, which only Spark in local mode sees: with another `spark.master`, or `spark.remote`, the path of a directory that the TaskManagers and all of Spark have in common.",
    )
    execution_spark_start_timeout_ms: DurationMs = Field(
        120_000,
        ge=1000,
        alias="execution.spark.start-timeout",
        description="How long Spark may take until its session is there.",
    )


def is_spark_key(key: str) -> bool:
    """Whether a key is one of Spark's own."""
    return key.startswith(SPARK_PREFIX) and key not in (SPARK_PREFIX, SPARK_OWN_KEYS)


def is_secret_spark_key(key: str) -> bool:
    """Whether the value of a key of Spark's is to be shown nowhere."""
    return is_spark_key(key) and _SECRET.search(key) is not None


def spark_text(value: object) -> str:
    """A value as Spark reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_local_master(master: str) -> bool:
    """Whether Spark runs in the driver's own process."""
    return master == "local" or master.startswith("local[")


def pinned_problem(own: Mapping[str, str]) -> str:
    """Which keys of a job do not go with parts of it that are compiled for Spark, "" = none.

    Example: with ANSI mode off, integers that overflow would wrap around.
        >>> pinned_problem({"spark.sql.ansi.enabled": "false", "spark.sql.shuffle.partitions": "8"})
        'spark.sql.ansi.enabled is false, and must be true'
    """
    return "; ".join(
        f"{key} is {own[key]}, and must be {value}"
        for key, value in PINNED.items()
        if own.get(key, value).lower() != value.lower()
    )


def spark_problem(own: Mapping[str, str], directory: str) -> str:
    """What is wrong with the keys of a job that runs something on Spark, "" = nothing.

    Args:
        own: Spark's own keys.
        directory: ``execution.spark.directory``.
    """
    master, remote = own.get("spark.master", ""), own.get("spark.remote", "")
    if master and remote:
        return "spark.master and spark.remote are two places for Spark: set one of them"
    if "session_id=" in remote:
        return "spark.remote names a session: leave session_id= out, each slot with Spark stages opens one and closes it"
    if remote:
        fixed = sorted(
            key for key in own if key != "spark.remote" and not key.startswith("spark.sql.")
        )
        if fixed:
            return (
                f"{', '.join(fixed)} cannot be set with spark.remote: the server of Spark Connect has been started "
                "with its own; set it there"
            )
    if master.startswith("spark://") and own.get("spark.authenticate", "") != "true":
        return (
            f"spark.master is {master}, and whoever reaches its executors may run code on them: set "
            "spark.authenticate to true, and spark.authenticate.secret in the daemons' configuration"
        )
    is_elsewhere = bool(remote) or (bool(master) and not is_local_master(master))
    if is_elsewhere and not directory:
        return (
            "Spark runs outside of the slot, so it does not see the slot's files: set execution.spark.directory to a "
            "directory that the TaskManagers and all of Spark have in common"
        )
    return ""
