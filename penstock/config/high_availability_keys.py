"""Keys of high availability: several JobManagers of which one leads, and what they keep together."""

from __future__ import annotations

import re
from typing import Final, Literal

from pydantic import BaseModel, Field, field_validator

from penstock.config.value_types import DEADLINE_MAX_MS, DurationMs

_SERVER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_PORT_MAX: Final = 65535


class HighAvailabilityKeys(BaseModel):
    """See the module."""

    high_availability_type: Literal["none", "zookeeper"] = Field(
        "none",
        alias="high-availability.type",
        description="Who decides which JobManager leads: `none` = one JobManager, which locks its directory; `zookeeper` = an election.",
    )
    high_availability_cluster_id: str = Field(
        "default",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        coerce_numbers_to_str=True,
        alias="high-availability.cluster-id",
        description="Tells this cluster from others in the same storage and ZooKeeper.",
    )
    high_availability_storage_dir: str = Field(
        "",
        alias="high-availability.storageDir",
        description="A directory that all JobManagers see, or `s3://bucket/prefix`: who leads, records and graphs of jobs, uploaded code and data.",
    )
    client_timeout_ms: DurationMs = Field(
        60_000,
        ge=0,
        le=DEADLINE_MAX_MS,
        alias="client.timeout",
        description="How long a client that was given several JobManagers waits for one of them to lead.",
    )
    high_availability_zookeeper_quorum: str = Field(
        "",
        alias="high-availability.zookeeper.quorum",
        description="ZooKeeper servers, host:port separated by commas.",
    )
    high_availability_zookeeper_path_root: str = Field(
        "/penstock",
        pattern=r"^(/[A-Za-z0-9._-]+)+$",
        alias="high-availability.zookeeper.path.root",
        description="Node below which each cluster has its own.",
    )
    high_availability_zookeeper_client_session_timeout_ms: DurationMs = Field(
        10_000,
        ge=100,
        alias="high-availability.zookeeper.client.session-timeout",
        description="After this time without a word ZooKeeper ends the leadership of a JobManager.",
    )
    high_availability_zookeeper_client_acl: Literal["open", "creator"] = Field(
        "open",
        alias="high-availability.zookeeper.client.acl",
        description="Who may touch the nodes: everybody, or only who is authenticated as their creator was.",
    )
    high_availability_zookeeper_client_auth: Literal["none", "digest", "sasl"] = Field(
        "none",
        alias="high-availability.zookeeper.client.auth",
        description="How JobManagers authenticate: not at all, by digest, or by SASL (DIGEST-MD5).",
    )
    high_availability_zookeeper_client_credentials_file: str = Field(
        "",
        alias="high-availability.zookeeper.client.credentials-file",
        description="File with `user:password` for it, readable by the daemon's user only.",
    )
    high_availability_zookeeper_client_tolerate_suspended_connections: bool = Field(
        True,
        alias="high-availability.zookeeper.client.tolerate-suspended-connections",
        description="A leader that has lost its connection goes on until its session is known to be over.",
    )

    @field_validator("high_availability_zookeeper_quorum")
    @classmethod
    def _servers(cls, quorum: str) -> str:
        """Without blanks; a node below which all others are may stand behind the last server."""
        servers, separator, node = quorum.partition("/")
        parts = [part.strip() for part in servers.split(",")] if quorum else []
        for part in parts:
            found = _SERVER.fullmatch(part)
            if found is None or not 0 < int((found[2] or ":1")[1:]) <= _PORT_MAX:
                raise ValueError(
                    f"{part!r} is no ZooKeeper server: write HOST:PORT[,HOST:PORT], for example "
                    "zookeeper-1:2181,zookeeper-2:2181,zookeeper-3:2181"
                )
        return ",".join(parts) + separator + node

    @field_validator("high_availability_zookeeper_path_root")
    @classmethod
    def _node(cls, path: str) -> str:
        if {".", ".."} & set(path.split("/")):
            raise ValueError("no node may be called '.' or '..'")
        return path
