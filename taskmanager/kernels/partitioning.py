"""Order of a batch's rows by output channel: then one ``take`` and slices make the partitions."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.storage.key_types import Int64Array
from taskmanager.kernels.backend import kernels as process_kernels

CHANNELS_MAX = 1 << 16


def partition_order(owners: np.ndarray[Any, Any], n_channels: int) -> tuple[Int64Array, Int64Array]:
    """Stable order of rows by channel.

    Args:
        owners: integers[n], the channel of each row.
        n_channels: number of channels, at most 65536.

    Returns:
        ``order``, int64[n], row numbers channel after channel, in each in the order of the batch;
        ``bounds``, int64[n_channels + 1]: channel c gets ``order[bounds[c]:bounds[c + 1]]``.

    Raises:
        ValueError: a row's channel does not exist.
    """
    if not 1 <= n_channels <= CHANNELS_MAX:
        raise ValueError(f"{n_channels} channels: there must be 1 to {CHANNELS_MAX}")
    order = np.empty(len(owners), dtype=np.int64)
    bounds = np.empty(n_channels + 1, dtype=np.int64)
    channels = np.require(owners, dtype=np.uint16, requirements=["C", "A"])
    wrong = process_kernels().partition(channels, order, bounds)
    if wrong >= 0:
        raise ValueError(
            f"row {wrong} goes to channel {owners[wrong]}, but there are {n_channels} channels"
        )
    return order, bounds
