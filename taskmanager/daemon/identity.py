"""Who this TaskManager is and what it has."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import secrets
import socket
from dataclasses import dataclass

from common.names import require_name
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.errors import ConfigurationError
from taskmanager.daemon.java import installed_java

_ID_LENGTH_MAX = 40


@dataclass(frozen=True, slots=True)
class TaskManagerIdentity:
    """What the JobManager is told about this TaskManager."""

    taskmanager_id: str
    rpc_address: str
    slots: int
    pid: int
    version: str
    python_version: str
    cloudpickle_version: str
    packages: tuple[str, ...]
    partition_endpoint: internal_pb2.DataEndpoint
    java_version: str = ""


def new_taskmanager_id(config: Configuration) -> str:
    """The configured id, else one made of host, pid and chance.

    Raises:
        ConfigurationError: the configured id is not usable as a name.
    """
    if config.taskmanager_id:
        if len(config.taskmanager_id) > _ID_LENGTH_MAX:
            raise ConfigurationError(f"taskmanager.id is longer than {_ID_LENGTH_MAX} characters")
        require_name("taskmanager.id", config.taskmanager_id)
        return config.taskmanager_id
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().split(".")[0])[:16].strip("-")
    return f"{host or 'host'}-{os.getpid()}-{secrets.token_hex(3)}"


def identify(
    taskmanager_id: str,
    rpc_address: str,
    slots: int,
    packages: dict[str, str],
    partition_endpoint: internal_pb2.DataEndpoint,
) -> TaskManagerIdentity:
    """What the JobManager is told at registration."""
    return TaskManagerIdentity(
        taskmanager_id=taskmanager_id,
        rpc_address=rpc_address,
        slots=slots,
        pid=os.getpid(),
        version=packages.get("penstock", ""),
        python_version=".".join(platform.python_version_tuple()[:2]),
        cloudpickle_version=importlib.metadata.version("cloudpickle"),
        packages=tuple(f"{name}=={version}" for name, version in sorted(packages.items())),
        partition_endpoint=partition_endpoint,
        java_version=installed_java(os.environ),
    )
