"""What travels beside a graph: code archives and tables, named by the hash of their content.

Invariants: the same content has the same id whatever it is called and whenever it was made (zips are
written with sorted names and fixed dates), so that nothing is uploaded twice.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.types as pt

from penstock.pb import graph_pb2

CODE = "code"
"""A zip that is put on the slot's ``sys.path``."""

DATA = "data"
"""An Arrow IPC file."""

_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
_ZIP_MODE = 0o100644 << 16
_TABLE_BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class LocalArtifact:
    """An artifact in this process, ready to be uploaded.

    Attributes:
        id: sha256 of the content, hex.
        name: the file name a person knows it by.
        kind: ``CODE`` or ``DATA``.
    """

    id: str
    name: str
    kind: str
    data: memoryview = field(repr=False, compare=False)

    @classmethod
    def of(cls, data: bytes | memoryview, *, name: str, kind: str) -> LocalArtifact:
        """An artifact with this content."""
        return cls(hashlib.sha256(data).hexdigest(), name, kind, memoryview(data))

    @property
    def size_bytes(self) -> int:
        """Length of the content."""
        return self.data.nbytes

    def chunks(self, chunk_bytes: int) -> Iterator[bytes]:
        """The content in pieces of at most ``chunk_bytes``; one empty piece where it is empty."""
        for start in range(0, max(self.size_bytes, 1), chunk_bytes):
            yield bytes(self.data[start : start + chunk_bytes])

    def to_proto(self) -> graph_pb2.Artifact:
        """How the graph names it."""
        return graph_pb2.Artifact(
            id=self.id, name=self.name, size_bytes=self.size_bytes, kind=self.kind
        )


def zip_bytes(files: Mapping[str, bytes]) -> bytes:
    """A zip of these files (name in the archive -> content); equal files give equal bytes."""
    buffer = io.BytesIO()
    # Python finds a package without __init__.py in a zip only where its directory has an entry.
    directories = {f"{parent}/" for name in files for parent in PurePosixPath(name).parents}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name in sorted({*files, *directories} - {"./"}):
            info = zipfile.ZipInfo(name, _ZIP_DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = _ZIP_MODE
            archive.writestr(info, files.get(name, b""))
    return buffer.getvalue()


def table_artifact(table: pa.Table, *, name: str) -> LocalArtifact:
    """The table as an Arrow IPC file, in batches that can be read one by one."""
    try:
        data = _file_of(table)
    except pa.ArrowInvalid:  # dictionaries of its chunks that together outgrow their index
        data = _file_of(_without_dictionaries(table))
    return LocalArtifact.of(memoryview(data), name=name, kind=DATA)


def _file_of(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)  # a file has one for each column
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=_TABLE_BATCH_ROWS)
    return sink.getvalue()


def _without_dictionaries(table: pa.Table) -> pa.Table:
    types = (kind.value_type if pt.is_dictionary(kind) else kind for kind in table.schema.types)
    fields = (field.with_type(kind) for field, kind in zip(table.schema, types, strict=True))
    return table.cast(pa.schema(fields))
