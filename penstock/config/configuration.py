"""The configuration of a cluster and of a job: the keys of all parts, and what they say together."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from penstock.config.checkpoint_keys import CheckpointKeys
from penstock.config.config_file import flat_keys, read_yaml
from penstock.config.daemon_keys import DaemonKeys
from penstock.config.high_availability_keys import HighAvailabilityKeys
from penstock.config.idle_keys import idle_keys
from penstock.config.job_keys import JobKeys
from penstock.config.spark_keys import (
    SPARK_OWN_KEYS,
    SparkKeys,
    is_secret_spark_key,
    is_spark_key,
    spark_problem,
    spark_text,
)
from penstock.errors import ConfigurationError
from penstock.storage.open_store import is_s3, open_store
from penstock.storage.s3.settings import S3Settings

_TYPES_WITH_EXPONENTIAL_DELAY = (None, "fallback", "exponential-delay", "exponentialdelay")
SECRET_KEYS = {"s3.access-key": "AWS_ACCESS_KEY_ID", "s3.secret-key": "AWS_SECRET_ACCESS_KEY"}
"""Keys whose values are shown nowhere, with the environment variable that says the same to the client library."""

_OF_EACH_PROCESS = ("s3.", "security.")

_OF_DAEMONS_ALONE = frozenset(
    {
        *(f"jobmanager.{key}" for key in ("rpc.address", "taskmanagers.max", "retained-jobs")),
        *(f"jobmanager.{key}" for key in ("failure-enrichers", "storage.dir")),
        *(f"taskmanager.{key}" for key in ("host", "data.port", "numberOfTaskSlots", "spill.dir")),
        *(
            f"{daemon}.{key}"
            for daemon in ("jobmanager", "taskmanager")
            for key in ("id", "rpc.port", "bind-host", "metrics.port", "logs.max-size")
        ),
    }
)
"""Keys that say what a daemon is when it starts."""

DEFAULT_CHECKPOINT_INTERVAL_MS = 10_000
"""Committing sinks need checkpoints: in streaming mode they are on unless they are turned off."""


class Configuration(DaemonKeys, HighAvailabilityKeys, CheckpointKeys, JobKeys, SparkKeys):
    """All settings of a cluster and of a job. Durations are milliseconds, sizes bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=False)

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
        self._check_high_availability()
        self._check_security()
        if self.taskmanager_spill_dir:
            self._check_copies_are_apart(Path(self.taskmanager_spill_dir))

    def _check_high_availability(self) -> None:
        if self.high_availability_type == "none":
            return
        needed = {
            "high-availability.storageDir": self.high_availability_storage_dir,
            "high-availability.zookeeper.quorum": self.high_availability_zookeeper_quorum,
        }
        if self.high_availability_zookeeper_client_auth != "none":
            needed["high-availability.zookeeper.client.credentials-file"] = (
                self.high_availability_zookeeper_client_credentials_file
            )
        missing = [key for key, value in needed.items() if not value]
        if missing:
            raise ConfigurationError(
                f"high-availability.type: zookeeper needs {' and '.join(missing)}: set what is missing"
            )
        try:
            open_store(self.high_availability_storage_dir)
        except ConfigurationError as error:
            raise ConfigurationError(f"high-availability.storageDir: {error}") from error
        storage = self.high_availability_storage_dir
        if not is_s3(storage) and not Path(storage.removeprefix("file://")).is_absolute():
            raise ConfigurationError(
                f"high-availability.storageDir: {storage!r} is a relative path, which JobManagers that were started "
                "elsewhere would look for elsewhere: give an absolute one, or s3://bucket/prefix"
            )
        if self.high_availability_zookeeper_client_acl == "creator" and (
            self.high_availability_zookeeper_client_auth == "none"
        ):
            raise ConfigurationError(
                "high-availability.zookeeper.client.acl: creator needs "
                "high-availability.zookeeper.client.auth: without it nobody is known as the creator"
            )

    def _check_security(self) -> None:
        if self.security_ssl_client_enabled and not self.security_ssl_internal_enabled:
            raise ConfigurationError(
                "security.ssl.client.enabled needs security.ssl.internal.enabled where a JobManager runs: clients are "
                "shown the certificate that it has for the other daemons"
            )
        if not self.security_ssl_internal_enabled:
            return
        needed = {
            "security.ssl.internal.cert": self.security_ssl_internal_cert,
            "security.ssl.internal.key": self.security_ssl_internal_key,
            "security.ssl.internal.ca": self.security_ssl_internal_ca,
        }
        missing = [key for key, value in needed.items() if not value]
        if missing:
            raise ConfigurationError(
                f"security.ssl.internal.enabled needs {' and '.join(missing)}: set what is missing"
            )

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
    def jobmanager_grace_ms(self) -> int:
        """How long a silent JobManager is waited for."""
        if self.taskmanager_jobmanager_grace_ms is not None:
            return self.taskmanager_jobmanager_grace_ms
        return 30_000 if self.high_availability_type == "none" else 300_000

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
    def spark_keys(self) -> dict[str, str]:
        """Spark's own keys."""
        return dict(self.spark_own or ())

    @property
    def spark_secrets(self) -> list[str]:
        """Those of Spark's own keys whose values are secret."""
        return [key for key in self.spark_keys if is_secret_spark_key(key)]

    def check_spark(self) -> None:
        """Checks the keys of a job that runs something on Spark.

        Raises:
            ConfigurationError: Spark cannot run so.
        """
        problem = spark_problem(self.spark_keys, self.execution_spark_directory)
        if problem:
            raise ConfigurationError(problem)

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
        flat = flat_keys(values)
        for key in flat:
            if not is_known_key(key):
                raise ConfigurationError(_unknown_key(key))
        if flat.get(SPARK_OWN_KEYS) is not None:
            raise ConfigurationError(
                f"{SPARK_OWN_KEYS} stands for keys of Spark's own: write each by its name, as spark.master"
            )
        given = {key: value for key, value in flat.items() if is_spark_key(key)}
        of_spark = {key: spark_text(value) for key, value in given.items() if value is not None}
        values = {key: value for key, value in flat.items() if key not in given}
        if of_spark:
            values[SPARK_OWN_KEYS] = tuple(sorted(of_spark.items()))
        try:
            return cls.model_validate(values)
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
        if path is None:
            return cls.from_mapping(overrides or {})
        in_file = read_yaml(path)
        try:
            return cls.from_mapping({**in_file, **flat_keys(overrides or {})})
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
        return self.from_mapping({**self.to_mapping(), **flat_keys(overrides)})

    def with_restart_strategy(self, keys: Mapping[str, object]) -> Configuration:
        """This configuration with one restart strategy in place of another; limits on failures stay."""
        kept = {
            key: value
            for key, value in self.to_mapping().items()
            if not is_of_restart_strategy(key)
        }
        return self.from_mapping({**kept, **keys})

    def said_in_vain(self) -> list[str]:
        """The keys that are set and that no job can change, since the daemons run already.

        >>> Configuration.from_mapping({"taskmanager.numberOfTaskSlots": 4, "state.backend.type": "rocksdb"}).said_in_vain()
        ['taskmanager.numberOfTaskSlots']
        """
        return sorted(_OF_DAEMONS_ALONE & self.to_mapping().keys())

    def without_effect(self, *, of_job: bool = False) -> list[str]:
        """What is set to other than its default and changes nothing, since another key says so; one sentence each.

        Args:
            of_job: this is a job's configuration, with that of its client, and not a daemon's.

        >>> Configuration.from_mapping({"traces.reporter.otel.exporter.timeout": "1s"}).without_effect()
        ['traces.reporter.otel.exporter.timeout: without effect, since traces.reporter.type is none']
        """
        defaults = _texts(Configuration().model_dump(exclude_none=True))
        return idle_keys(self.to_mapping(), defaults, of_job=of_job)

    def of_job(self) -> dict[str, str]:
        """``to_mapping`` without what is a matter of each process, and may be secret: how it reaches S3, whom it believes,
        secrets of Spark's."""
        return {
            key: value
            for key, value in self.to_mapping().items()
            if not (key.startswith(_OF_EACH_PROCESS) or is_secret_spark_key(key))
        }

    def to_mapping(self) -> dict[str, str]:
        """The keys that were set, as text: where it is merged, one that says the default counts too."""
        values = self.model_dump(exclude_unset=True, exclude_none=True)
        own = dict(values.pop("spark_own", ()))
        return own | _texts(values)


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    """Keys and values as text."""
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


def is_known_key(key: str) -> bool:
    """Whether a configuration may have the key."""
    return key in _FIELD_BY_KEY or is_spark_key(key)


def known_keys() -> list[str]:
    """Every configuration key."""
    return list(_FIELD_BY_KEY)


def parse_override(text: str) -> tuple[str, str]:
    """The key and value of ``-D key=value``.

    Raises:
        ConfigurationError: there is no ``=``, or the key is unknown.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"-D {text}: write -D key=value")
    key = key.strip()
    if not is_known_key(key):
        raise ConfigurationError(_unknown_key(key))
    return key, value.strip()


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key, _FIELD_BY_KEY, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown configuration key {key}{hint}"
