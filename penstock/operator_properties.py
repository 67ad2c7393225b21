"""The properties a user may set on an operator: uid, name, parallelism, slot group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from penstock.errors import JobRejected
from penstock.job_builder import JobBuilder
from penstock.logical import Node
from penstock.storage.key_groups import MAX_MAX_PARALLELISM


class OperatorProperties(ABC):
    """Calls that change the last operator and return the same stream."""

    @abstractmethod
    def _target(self, call: str) -> tuple[JobBuilder, Node]:
        """The operator that ``call`` applies to."""

    def uid(self, uid: str) -> Self:
        """Names the operator's state for good, so that it is found again after changes of the job."""
        builder, node = self._target("uid")
        if not isinstance(uid, str) or not uid.strip():
            raise JobRejected(f"uid: {uid!r} is not a name")
        builder.claim_uid(uid, node)
        node.properties.uid = uid
        return self

    def name(self, name: str) -> Self:
        """What the operator is called in plans, logs, metrics and errors."""
        _, node = self._target("name")
        if not isinstance(name, str) or not name.strip():
            raise JobRejected(f"name: {name!r} is not a name")
        node.properties.name = name
        return self

    def parallelism(self, n: int) -> Self:
        """How many subtasks run the operator."""
        _, node = self._target("parallelism")
        node.properties.parallelism = _count("parallelism", n)
        return self

    def max_parallelism(self, n: int) -> Self:
        """Number of key-groups: the highest parallelism that the operator's state can ever have."""
        _, node = self._target("max_parallelism")
        node.properties.max_parallelism = _count("max_parallelism", n)
        return self

    def slot_group(self, group: str) -> Self:
        """Operators of different groups never share a slot; the default is the group of the inputs."""
        _, node = self._target("slot_group")
        if not isinstance(group, str) or not group.strip():
            raise JobRejected(f"slot_group: {group!r} is not a name")
        node.properties.slot_group = group
        return self


def _count(call: str, n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_MAX_PARALLELISM:
        raise JobRejected(f"{call}: {n!r} is not a number from 1 to {MAX_MAX_PARALLELISM}")
    return n
