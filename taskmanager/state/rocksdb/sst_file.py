"""Sorted entries as the bytes of an SST file that RocksDB can ingest.

RocksDB's own writer takes entry by entry and holds the interpreter lock at each; here a whole table
becomes a file with a handful of array operations, most of which release the lock.

The format is the block-based table of RocksDB, version 3 (readable by every RocksDB since 5.15): data
blocks, an index block with the last key of each data block, a properties block, a metaindex block and
the footer. Nothing is compressed and no key shares a prefix with the one before it; compaction turns
the files into ordinary ones soon. Each block carries its checksum (XXH64), which RocksDB verifies whenever
it reads the block, in compactions too.

Invariants: keys are different and ascending by their bytes; an entry has sequence number 0, which
ingestion replaces by the database's next one.

Source: RocksDB, table/block_based (block builder, footer) and external_sst_file properties.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import xxhash

from penstock.storage.entries.byte_strings import SstEntries, varint
from penstock.storage.key_types import ByteArray, Int64Array
from taskmanager.state.rocksdb.sst_blocks import (
    KEY_TRAILER_BYTES,
    TRAILER,
    BlockBuilder,
    data_blocks,
    index_block,
)

CHUNK_ENTRIES: Final = 1 << 15
"""Entries that are turned into bytes at once."""

_FOOTER_BYTES: Final = 53
_FORMAT_VERSION: Final = 3
_MAGIC: Final = 0x88E241B785F4CFF7
_XXH64: Final = 3
"""Type of the checksums: each is the lower half of the hash of a block and the type behind it."""
_CHECKSUM_BYTES: Final = 4


def sst_file(entries: SstEntries) -> Iterator[bytes | memoryview]:
    """The bytes of the file that holds at least one entry, in parts."""
    count = len(entries.keys)
    assert count, "an SST file holds at least one entry"
    last_rows, positions, sizes = [], [], []
    position = 0
    for start in range(0, count, CHUNK_ENTRIES):
        part = data_blocks(entries, start, min(start + CHUNK_ENTRIES, count))
        last_rows.append(part.last_rows)
        positions.append(part.starts[:-1] + position)
        sizes.append(np.diff(part.starts) - len(TRAILER))
        position += len(part.data)
        yield _with_checksums(part.data, part.starts)
    index = index_block(
        entries.keys,
        np.concatenate(last_rows),
        np.concatenate(positions),
        np.concatenate(sizes),
    )
    index_handle = varint(position) + varint(len(index))
    yield _sealed(index)
    deleted = 0 if entries.deleted is None else int(entries.deleted.sum())
    properties_at = position + len(index) + len(TRAILER)
    properties = _properties(entries, deleted, position, len(index))
    yield _sealed(properties)
    metaindex = BlockBuilder()
    metaindex.add(b"rocksdb.properties", varint(properties_at) + varint(len(properties)))
    metaindex_block = metaindex.finish()
    metaindex_at = properties_at + len(properties) + len(TRAILER)
    yield _sealed(metaindex_block)
    handles = varint(metaindex_at) + varint(len(metaindex_block)) + index_handle
    footer = bytes([_XXH64]) + handles.ljust(_FOOTER_BYTES - 13, b"\0")
    yield footer + struct.pack("<IQ", _FORMAT_VERSION, _MAGIC)


def _with_checksums(blocks: ByteArray, starts: Int64Array) -> memoryview:
    """The blocks, with the checksums that their trailers lack."""
    data = blocks.data
    for start, stop in pairwise(starts.tolist()):
        end = stop - _CHECKSUM_BYTES
        data[end:stop] = _checksum(data[start:end])
    return data


def _sealed(block: bytes) -> bytes:
    """A block with its trailer."""
    typed = block + TRAILER[:-_CHECKSUM_BYTES]
    return typed + _checksum(typed)


def _checksum(typed: bytes | memoryview) -> bytes:
    """Of a block with the byte behind it, the type of its compression."""
    return xxhash.xxh64_intdigest(typed).to_bytes(8, "little")[:_CHECKSUM_BYTES]


def _properties(entries: SstEntries, deleted: int, data_bytes: int, index_bytes: int) -> bytes:
    keys, values = entries.keys, entries.values
    raw_keys = int(keys.offsets[-1] - keys.offsets[0]) + KEY_TRAILER_BYTES * len(keys)
    properties = {
        b"rocksdb.block.based.table.index.type": struct.pack("<I", 0),
        b"rocksdb.comparator": b"leveldb.BytewiseComparator",
        b"rocksdb.compression": b"NoCompression",
        b"rocksdb.data.size": varint(data_bytes),
        b"rocksdb.deleted.keys": varint(deleted),
        b"rocksdb.external_sst_file.global_seqno": struct.pack("<Q", 0),
        b"rocksdb.external_sst_file.version": struct.pack("<I", 2),
        b"rocksdb.format.version": varint(_FORMAT_VERSION),
        b"rocksdb.index.key.is.user.key": varint(1),
        b"rocksdb.index.size": varint(index_bytes),
        b"rocksdb.index.value.is.delta.encoded": varint(0),
        b"rocksdb.num.entries": varint(len(keys)),
        b"rocksdb.raw.key.size": varint(raw_keys),
        b"rocksdb.raw.value.size": varint(int(values.offsets[-1] - values.offsets[0])),
    }
    block = BlockBuilder()
    for name, value in sorted(properties.items()):
        block.add(name, value)
    return block.finish()
