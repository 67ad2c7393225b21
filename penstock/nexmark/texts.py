"""The texts of Nexmark events: small fixed dictionaries that events pick from.

Each dictionary is made once per process, is the same everywhere and for every seed, and has the lengths
that bring events to the reference's average sizes (bids 100 bytes, auctions 500, persons 200).
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa

HOT_CHANNELS = 4
BID_CHANNELS = 10_000

_ALPHABET = 26
_TEXTS = 4096


def _random_texts(tag: int, count: int, shortest: int, longest: int) -> pa.Array:
    """Lower-case texts of uniform lengths, from a generator that is part of this file's format."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2 * tag + 1)
    lengths = shortest + (_scramble(state) % np.uint64(longest - shortest + 1)).astype(np.int64)
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    letters = np.arange(int(offsets[-1]), dtype=np.uint64) + np.uint64(tag << 32)
    data = (_scramble(letters) % np.uint64(_ALPHABET) + np.uint64(ord("a"))).astype(np.uint8)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(data))


def _scramble(
    words: np.ndarray[tuple[int], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


@functools.cache
def channel_names() -> pa.Array:
    """The hot channels, then the others."""
    cold = [f"channel-{number}" for number in range(BID_CHANNELS)]
    return pa.array(["Google", "Facebook", "Baidu", "Apple", *cold])


@functools.cache
def channel_urls() -> pa.Array:
    """The address of each channel's items, in the order of ``channel_names``."""
    paths = _random_texts(1, 3 * (HOT_CHANNELS + BID_CHANNELS), 5, 5).to_pylist()
    urls: list[str] = []
    for index in range(HOT_CHANNELS + BID_CHANNELS):
        path = "/".join(paths[3 * index : 3 * index + 3])
        channel = "" if index < HOT_CHANNELS else f"&channel_id={index - HOT_CHANNELS}"
        urls.append(f"https://www.nexmark.com/{path}/item.htm?query=1{channel}")
    return pa.array(urls)


@functools.cache
def bid_extras() -> pa.Array:
    """Filling of bids."""
    return _random_texts(2, _TEXTS, 54, 82)


@functools.cache
def auction_extras() -> pa.Array:
    """Filling of auctions."""
    return _random_texts(3, _TEXTS, 300, 440)


@functools.cache
def person_extras() -> pa.Array:
    """Filling of persons."""
    return _random_texts(4, _TEXTS, 80, 120)


@functools.cache
def item_names() -> pa.Array:
    """Names of items."""
    return _random_texts(5, _TEXTS, 3, 20)


@functools.cache
def descriptions() -> pa.Array:
    """Descriptions of items."""
    return _random_texts(6, _TEXTS, 20, 100)


@functools.cache
def emails() -> pa.Array:
    """Addresses of persons."""
    users = _random_texts(7, _TEXTS, 3, 7).to_pylist()
    hosts = _random_texts(8, _TEXTS, 3, 5).to_pylist()
    return pa.array([f"{user}@{host}.com" for user, host in zip(users, hosts, strict=True)])


@functools.cache
def digit_groups() -> pa.Array:
    """The groups of four digits that card numbers are made of."""
    return pa.array([f"{number:04}" for number in range(10_000)])


@functools.cache
def first_names() -> pa.Array:
    """Given names."""
    return pa.array(
        [
            "Peter",
            "Paul",
            "Luke",
            "John",
            "Saul",
            "Vicky",
            "Kate",
            "Julie",
            "Sarah",
            "Deiter",
            "Walter",
        ]
    )


@functools.cache
def last_names() -> pa.Array:
    """Family names."""
    return pa.array(
        ["Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"]
    )


@functools.cache
def cities() -> pa.Array:
    """Cities of persons."""
    return pa.array(
        [
            "Phoenix",
            "Los Angeles",
            "San Francisco",
            "Boise",
            "Portland",
            "Bend",
            "Redmond",
            "Seattle",
            "Kent",
            "Cheyenne",
        ]
    )


@functools.cache
def states() -> pa.Array:
    """States of persons."""
    return pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"])
