"""How the small objects that decide about everything are written: so that damage cannot go unseen.

A frame is, all numbers little-endian::

    magic (8 bytes) | format version (4) | payload length (8) | payload | digest (16)

The digest is BLAKE2b over all before it. Every version of a format keeps this frame, so that a reader
can tell a frame that is damaged from one that is newer than it. What says "not what was written" is
always ``StoreCorrupt``, and a frame that passes is the one that was written.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from penstock.errors import StoreCorrupt

_HEADER: Final = struct.Struct("<8sIQ")
_DIGEST_BYTES: Final = 16
OVERHEAD_BYTES: Final = _HEADER.size + _DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class FrameFormat:
    """One kind of object.

    Attributes:
        noun: what messages call it: "a checkpoint manifest".
        magic: 8 bytes that no other kind begins with.
        version: what is written, and the newest that is read.
    """

    noun: str
    magic: bytes
    version: int


def encode_frame(kind: FrameFormat, payload: bytes) -> bytes:
    """The payload in its frame."""
    framed = _HEADER.pack(kind.magic, kind.version, len(payload)) + payload
    return framed + _digest(framed)


def decode_frame(kind: FrameFormat, content: bytes, path: str) -> tuple[int, bytes]:
    """The format version and the payload of a frame.

    Args:
        path: where it comes from, for messages.

    Raises:
        StoreCorrupt: it is truncated, altered, of another kind, or of a newer format.
    """
    magic = content[: len(kind.magic)]
    if not kind.magic.startswith(magic):
        raise StoreCorrupt(f"{path} is not {kind.noun}: it begins with {magic!r}")
    if len(content) < OVERHEAD_BYTES:
        raise StoreCorrupt(
            f"{path} is truncated: {len(content)} bytes, {kind.noun} has {OVERHEAD_BYTES} or more"
        )
    _, version, payload_bytes = _HEADER.unpack_from(content)
    expected_bytes = OVERHEAD_BYTES + payload_bytes
    if len(content) != expected_bytes:
        how = "truncated" if len(content) < expected_bytes else "altered"
        raise StoreCorrupt(f"{path} is {how}: {len(content)} of {expected_bytes} bytes")
    framed, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if _digest(framed) != digest:
        raise StoreCorrupt(
            f"{path} is altered: its checksum is {_digest(framed).hex()}, it was {digest.hex()}"
        )
    if not 1 <= version <= kind.version:
        raise StoreCorrupt(
            f"{path} is {kind.noun} of format version {version}, and this Penstock reads up to "
            f"version {kind.version}: use the Penstock that wrote it, or a newer one"
        )
    return version, framed[_HEADER.size :]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
