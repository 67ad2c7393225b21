"""The bytes of a text file, by their offset in the text: plain, or decompressed from the start."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod

import pyarrow as pa
from typing_extensions import Buffer, override

from penstock.connectors.text_options import damage, decompressed
from penstock.errors import TaskFailure, Unrecoverable
from taskmanager.connectors.file_identity import CHUNK_BYTES, OpenedFile, checksum_of, replaced


class TextBytes(ABC):
    """A text whose end may not be known."""

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer only at the end of the text.

        Raises:
            TaskFailure: they cannot be read.
            Unrecoverable: the file has become smaller.
        """

    def read_on(self, offset: int, length: int) -> tuple[bytes, bool]:
        """As ``read``, and whether the text ends behind the bytes."""
        data = self.read(offset, length + 1)
        return (data, True) if len(data) <= length else (data[:length], False)

    def checksum(self, start: int, end: int, checksum: int = 0) -> int:
        """CRC-32 of a stretch of the text, as far as it goes, behind what ``checksum`` is of."""
        return checksum_of(self.read, start, end, checksum)


class PlainText(TextBytes):
    """The file's own bytes, up to an end."""

    def __init__(self, file: OpenedFile, end: int) -> None:
        self._file = file
        self._end = end

    @override
    def read(self, offset: int, length: int) -> bytes:
        length = min(length, self._end - offset)
        data = self._file.read(offset, length) if length > 0 else b""
        if len(data) < length:
            raise Unrecoverable(
                f"{self._file.path}: ends at byte {offset + len(data)}, but had {self._end} bytes when "
                "it was found: it was cut off while the job ran"
            )
        return data

    @override
    def read_on(self, offset: int, length: int) -> tuple[bytes, bool]:
        data = self.read(offset, length)
        return data, offset + len(data) >= self._end


class CompressedText(TextBytes):
    """Decompressed as it is read; going back begins at the start again.

    Args:
        end: bytes of it that belong to the text.
        compression: "gzip" | "zstd" | "bz2"
        version: of the file that was found: the end of another one may lie elsewhere.
    """

    def __init__(self, file: OpenedFile, end: int, compression: str, version: str) -> None:
        self._file = file
        self._version = version
        self._compressed = PlainText(file, end)
        self._compression = compression
        self._rewind()

    def _rewind(self) -> None:
        self._stream = decompressed(
            io.BufferedReader(_Stream(self._compressed), CHUNK_BYTES), self._compression
        )
        self._start, self._window = 0, b""

    @override
    def read(self, offset: int, length: int) -> bytes:
        if offset < self._start:
            self._rewind()
        while offset > self._start + len(self._window):
            self._start += len(self._window)
            self._window = self._more(min(CHUNK_BYTES, offset - self._start))
            if not self._window:
                return b""
        self._window = self._window[offset - self._start :]
        self._start = offset
        pieces = [self._window]
        missing = length - len(self._window)
        while missing > 0 and (more := self._more(missing)):
            pieces.append(more)
            missing -= len(more)
        self._window = b"".join(pieces)
        return self._window[:length]

    def _more(self, length: int) -> bytes:
        try:
            return self._stream.read(length)
        except (OSError, pa.ArrowException) as error:
            if self._file.version != self._version:
                raise replaced(self._file.path) from error
            raise TaskFailure(damage(self._file.path, self._compression, error)) from error


class _Stream(io.RawIOBase):
    """Plain bytes as a stream."""

    def __init__(self, text: PlainText) -> None:
        self._text = text
        self._offset = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        data = self._text.read(self._offset, len(view))
        view[: len(data)] = data
        self._offset += len(data)
        return len(data)
