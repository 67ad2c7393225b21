"""What is read range by range, as a stream that is read from wherever one likes.

>>> content = b"penstock"
>>> stream = RangedStream(lambda offset, length: content[offset : offset + length], len(content))
>>> stream.seek(-5, io.SEEK_END), stream.read(3), stream.read()
(3, b'sto', b'ck')
"""

from __future__ import annotations

import io
from collections.abc import Callable

from typing_extensions import Buffer, override


class RangedStream(io.RawIOBase):
    """See the module.

    Args:
        read: bytes from an offset, as many as are asked for, or fewer at the end.
        size_bytes: of the whole.
    """

    def __init__(self, read: Callable[[int, int], bytes], size_bytes: int) -> None:
        super().__init__()
        self._read = read
        self._size_bytes = size_bytes
        self._offset = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._offset

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size_bytes}[whence]
        self._offset = max(base + offset, 0)
        return self._offset

    @override
    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        length = min(len(view), max(0, self._size_bytes - self._offset))
        data = self._read(self._offset, length) if length else b""
        view[: len(data)] = data
        self._offset += len(data)
        return len(data)
