"""What is kept per group of one aggregate: the contract of all columns beside the numbers.

Groups are small integers that the owner gives out (the dense index of a key, the number of a session).
A column takes a batch at a time, in order of arrival; ``sequence`` numbers rows over everything an
operator has seen, so that parts of a group that were kept apart (slices, sessions) merge to what they
would have been in one piece. All methods take whole index vectors.

The *state* of a group is one Arrow value (``state_field``). ``freeze`` copies positions, but no values, on
the mailbox thread; what it returns makes the states on any other while the column goes on changing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.aggregates.stored_fields import group_field, group_type
from penstock.storage.key_types import Int64Array
from taskmanager.state.value_log import FrozenStates


class GroupColumn(ABC):
    """One aggregate's state for all groups of a table. A group that was never updated is empty."""

    def __init__(self, spec: GroupColumnSpec) -> None:
        self.spec = spec

    @abstractmethod
    def update(self, groups: Int64Array, sequence: Int64Array, values: Any) -> None:
        """Adds n values.

        Args:
            groups: int64[n], the group of each.
            sequence: int64[n], its place in the order of arrival, ascending.
            values: n values (an Arrow array of plain type).
        """

    @abstractmethod
    def merge(self, other: GroupColumn, source: Int64Array, target: Int64Array) -> None:
        """Adds other's group ``source[i]`` to group ``target[i]``; ``other`` may be this column.

        Several sources may go to one target; no group is both source and target.
        """

    @abstractmethod
    def clear(self, groups: Int64Array) -> None:
        """Makes the groups empty."""

    @abstractmethod
    def results(self, groups: Int64Array) -> pa.Array:
        """The value of each group."""

    def state_field(self) -> pa.Field:
        """The column of the groups' states; its metadata names the codec where there is a choice."""
        return group_field(self.spec, self.state_type)

    @property
    def state_type(self) -> pa.DataType:
        """Type of the state of a group."""
        return group_type(self.spec)

    @abstractmethod
    def freeze(self, groups: Int64Array) -> FrozenStates:
        """The states of n different groups as they are now.

        Returns:
            What makes the states of some of them: it takes indices in ``groups``, and may be called on
            another thread.
        """

    @abstractmethod
    def restore(self, groups: Int64Array, states: pa.Array) -> None:
        """Sets the states of n different groups.

        Raises:
            TaskFailure: a state cannot be read.
        """

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Approximate size."""


def valid_rows(values: pa.Array) -> Int64Array:
    """Positions of the values that are not null."""
    rows: Int64Array = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    return rows
