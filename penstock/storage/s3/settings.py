"""Where S3 is, who asks, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

PART_BYTES_MIN: Final = 5 << 20
"""S3 takes no smaller part, but for the last."""
PART_BYTES_MAX: Final = 5 << 30


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How a process reaches S3; equal ones share their connections.

    Attributes:
        endpoint: "" = that of AWS for the region.
        region: "" = as the environment of the process says.
        is_path_style: the bucket is named in the path, not in the host.
        access_key: "" = by the usual chain: environment, shared files, the role of the machine.
        request_timeout_ms: of one attempt: connecting, and each silence of the server.
        retry_timeout_ms: of a call with all its attempts.
        part_bytes: of a part of an upload.
        upload_bytes_max: what the parts of all uploads of the process may take at once.
        first_answer_ms: how long a process waits whom no server has answered yet; 0 = as for any other call.
        checksums: when the client adds the newer checksum headers, which older servers refuse.
    """

    endpoint: str = ""
    region: str = ""
    is_path_style: bool = False
    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)
    request_timeout_ms: int = 30_000
    retry_timeout_ms: int = 120_000
    part_bytes: int = 16 << 20
    upload_bytes_max: int = 64 << 20
    checksums: Literal["when_required", "when_supported"] = "when_required"
    first_answer_ms: int = 0
