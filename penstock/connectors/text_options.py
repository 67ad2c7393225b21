"""How text files are to be read: what a user may say about CSV and JSON beyond their columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from penstock.connectors.input_files import open_input
from penstock.connectors.messages import name_list, shorten
from penstock.errors import JobRejected
from penstock.pb import graph_pb2

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
NOT_COMPRESSED = "none"

_NO_DELIMITERS = '"\r\n'


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of ``read_csv`` and ``read_json``.

    Attributes:
        delimiter: between two fields of CSV, one ASCII character.
        header: the first row of CSV names the columns; otherwise the schema does, in order.
        nulls: texts of CSV fields that are null in all columns; None: only empty fields that are no text.
        optional: columns that a file need not have; they are null there.
        compression: "gzip" | "zstd" | "bz2" | "none"; "" = as the file's name ends.
    """

    delimiter: str = ","
    header: bool = True
    nulls: tuple[str, ...] | None = None
    optional: frozenset[str] = frozenset()
    compression: str = ""

    def of_file(self, path: str) -> str:
        """The compression of a file, "" = none."""
        if self.compression:
            return "" if self.compression == NOT_COMPRESSED else self.compression
        return COMPRESSIONS.get(Path(path).suffix.lower(), "")

    def encode(self) -> graph_pb2.TextOptions:
        """For the job graph."""
        return graph_pb2.TextOptions(
            delimiter=self.delimiter,
            no_header=not self.header,
            nulls=self.nulls or (),
            has_nulls=self.nulls is not None,
            optional=sorted(self.optional),
            compression=self.compression,
        )

    @staticmethod
    def decode(spec: graph_pb2.TextOptions) -> TextOptions:
        """Inverse of ``encode``."""
        return TextOptions(
            spec.delimiter or ",",
            not spec.no_header,
            tuple(spec.nulls) if spec.has_nulls else None,
            frozenset(spec.optional),
            spec.compression,
        )


DEFAULTS = TextOptions()


def text_options(
    *,
    delimiter: str = ",",
    header: bool = True,
    nulls: Sequence[str] | str | None = None,
    optional: Sequence[str] | str = (),
    compression: str | None = None,
) -> TextOptions:
    """The options, checked.

    Raises:
        JobRejected: one is none.
    """
    is_one = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
    if not is_one or delimiter in _NO_DELIMITERS:
        raise JobRejected(
            f"read_csv: delimiter is {delimiter!r}; it must be one ASCII character, neither a quote nor "
            "a line end"
        )
    if not isinstance(header, bool):
        raise JobRejected(f"read_csv: header is {header!r}; it must be True or False")
    known = (*dict.fromkeys(COMPRESSIONS.values()), NOT_COMPRESSED)
    if compression is not None and compression not in known:
        raise JobRejected(
            f"compression is {compression!r}; known are {name_list(known)}; without it the file's suffix "
            f"says it ({name_list(COMPRESSIONS)})"
        )
    return TextOptions(
        delimiter,
        header,
        None if nulls is None else tuple(_texts("nulls", nulls)),
        frozenset(_texts("optional", optional)),
        compression or "",
    )


def _texts(name: str, values: Sequence[str] | str) -> list[str]:
    texts = [values] if isinstance(values, str) else list(values)
    if not all(isinstance(text, str) for text in texts):
        raise JobRejected(f"{name}={values!r}: it takes texts")
    return texts


def decompressed(stream: BinaryIO, compression: str) -> BinaryIO:
    """The text of a stream of compressed bytes; members and frames behind one another are one text."""
    return cast("BinaryIO", pa.CompressedInputStream(pa.PythonFile(stream, "r"), compression))


def damage(path: str, compression: str, error: Exception) -> str:
    """What to say of a compressed file that cannot be read."""
    return f"{path}: not readable {compression}: it is damaged or cut off: {shorten(str(error))}"


def read_head(path: str, length: int, options: TextOptions) -> bytes:
    """The first bytes of a file's text.

    Raises:
        JobRejected: it is damaged.
        OSError: it cannot be read.
    """
    compression = options.of_file(path)
    with open_input(path) as file:
        if not compression:
            return file.read(length)
        data = file.read(length)
        whole = len(data) < length
        text = b""
        with decompressed(io.BytesIO(data), compression) as stream:
            try:
                while len(text) < length and (more := stream.read(length - len(text))):
                    text += more
            except (OSError, pa.ArrowException) as error:
                if whole:
                    raise JobRejected(damage(path, compression, error)) from error
        return text
