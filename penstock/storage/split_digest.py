"""What stands in state for a split of a source that was read to its end."""

from __future__ import annotations

import hashlib
from typing import Final

DIGEST_BYTES: Final = 16
_PERSON: Final = b"penstock split"


def digest_of(split_id: str) -> bytes:
    """What stands for a split in every checkpoint from now on."""
    return hashlib.blake2b(split_id.encode(), digest_size=DIGEST_BYTES, person=_PERSON).digest()
