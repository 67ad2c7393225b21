"""The properties a user may set on an operator: uid, name, parallelism, slot group, exchange, ..."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from penstock.errors import JobRejected
from penstock.graph.determinism import never_deterministic
from penstock.graph.exchanges import exchange_of
from penstock.graph.logical import Node, WriteSink
from penstock.storage.key_groups import MAX_MAX_PARALLELISM
from penstock.streams.job_builder import JobBuilder


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

    def colocate(self, group: str) -> Self:
        """Keeps subtasks of equal index of all operators of the group in one slot, and restarts them together.

        The operators need the same parallelism and slot group.
        """
        _, node = self._target("colocate")
        if not isinstance(group, str) or not group.strip():
            raise JobRejected(f"colocate: {group!r} is not a name")
        node.properties.colocation_group = group
        return self

    def exchange(self, kind: str) -> Self:
        """What becomes of the rows of the operator's main output on their way to the next operators.

        Args:
            kind: "pipelined" (gone when they are read), "blocking" (complete before they are read; for
                bounded input), "caching" (read while they are made, and kept since the newest
                checkpoint) or "caching-memory" (the same as long as memory lasts). All but the first
                keep restarts on one side of the exchange from reaching the other.
        """
        _, node = self._target("exchange")
        if isinstance(node.operation, WriteSink):
            raise JobRejected(
                f"exchange: nothing reads from the sink {node.name!r}; set it on the operator before"
            )
        node.properties.exchange = exchange_of(kind)
        return self

    def deterministic(self, value: bool = True) -> Self:
        """Declares whether the operator gives out equal rows for equal input.

        What is declared holds whatever the order in which rows of different subtasks meet, however they
        are cut into batches, and whenever watermarks arrive; for windows and joins also that no row is
        late. Then consumers need not be restarted with it: see docs/exchanges.md.

        Args:
            value: False takes back what would be assumed of a columnar operator, or of a whole job.
        """
        _, node = self._target("deterministic")
        if not isinstance(value, bool):
            raise JobRejected(f"deterministic: {value!r} is neither True nor False")
        if isinstance(node.operation, WriteSink):
            raise JobRejected(
                f"deterministic: nothing reads from the sink {node.name!r}, so it makes no difference"
            )
        reason = never_deterministic(node)
        if value and reason:
            raise JobRejected(
                f"deterministic: {node.name!r} cannot be: {reason}. Leave the call out"
            )
        node.properties.deterministic = value
        return self


def _count(call: str, n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_MAX_PARALLELISM:
        raise JobRejected(f"{call}: {n!r} is not a number from 1 to {MAX_MAX_PARALLELISM}")
    return n
