"""How much memory Python objects take, estimated from a few of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

SAMPLES: Final = 32
_DEPTH_MAX: Final = 4
_ITEMS_MAX: Final = 16


def average_bytes(values: Sequence[Any]) -> float:
    """Average size of n objects, by some of them spread over all; 0 for none."""
    if not values:
        return 0.0
    step = max(1, len(values) // SAMPLES)
    sampled = values[::step][: 2 * SAMPLES]
    return sum(object_bytes(value) for value in sampled) / len(sampled)


def object_bytes(value: Any, depth: int = 0) -> int:
    """Size of an object with what it holds; large containers by their first items."""
    size = sys.getsizeof(value, 64)
    if depth >= _DEPTH_MAX:
        return size
    if isinstance(value, dict):
        items: list[Any] = [part for pair in _first(value.items()) for part in pair]
        count = 2 * len(value)
    elif isinstance(value, (tuple, list, set, frozenset)):
        items, count = _first(value), len(value)
    else:
        return size
    if not items:
        return size
    inner = sum(object_bytes(item, depth + 1) for item in items)
    return size + inner * count // len(items)


def _first(items: Any) -> list[Any]:
    return [item for item, _ in zip(items, range(_ITEMS_MAX), strict=False)]
