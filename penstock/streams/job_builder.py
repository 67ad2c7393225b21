"""What an environment collects while the user builds a job: nodes, sinks, uids, collected rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa

from penstock.client.collected import CollectedRows
from penstock.errors import JobRejected, StreamError
from penstock.graph.logical import Node, NodeInput, Operation, ReadSource, WriteSink
from penstock.rows.column_types import check_column_types


class JobBuilder:
    """The job under construction.

    Args:
        run: runs the job that has been built; called by rows that are read before it was.
        submit: submits it, to end with a loop; called by rows that are read as they come.
    """

    def __init__(self, run: Callable[[], object], submit: Callable[[], object]) -> None:
        self._run = run
        self._submit = submit
        self._node_count = 0
        self._uids: dict[str, Node] = {}
        self.sinks: list[Node] = []
        self.collected: list[CollectedRows] = []

    def add(
        self,
        operation: Operation,
        inputs: tuple[NodeInput, ...],
        *,
        label: str,
        schema: pa.Schema,
        has_event_time: bool,
        is_inserted: bool = False,
        hidden_columns: frozenset[str] = frozenset(),
    ) -> Node:
        """A new node; a sink becomes part of the job at once, others when a sink reads from them.

        Raises:
            JobRejected: a column has a type that no row of a stream can have.
        """
        check_column_types(label, schema)
        node = Node(
            index=self._node_count,
            operation=operation,
            inputs=inputs,
            label=label,
            schema=schema,
            has_event_time=has_event_time,
            is_inserted=is_inserted,
            hidden_columns=hidden_columns,
        )
        self._node_count += 1
        if isinstance(operation, WriteSink):
            self.sinks.append(node)
        return node

    def reading(self, sink: Node, source: NodeInput) -> Node:
        """A sink of the job as it would be with another input; the job itself is left as it is."""
        self._node_count += 1
        return replace(sink, index=self._node_count - 1, inputs=(source,))

    def collect(self, schema: pa.Schema, limit: int) -> CollectedRows:
        """The rows of a new collect sink of this job."""
        rows = CollectedRows(
            f"collect-{len(self.collected)}", schema, limit, self._run, self._submit
        )
        self.collected.append(rows)
        return rows

    @property
    def only_collects(self) -> bool:
        """Whether the job has no other sinks than those that bring rows back."""
        return len(self.sinks) == len(self.collected)

    @property
    def is_limited(self) -> bool:
        """Whether it brings back so many rows and no more."""
        return self.only_collects and all(rows.limit for rows in self.collected)

    @property
    def is_endless(self) -> bool:
        """Whether one of its sources is."""
        seen: set[int] = set()
        waiting = list(self.sinks)
        while waiting:
            node = waiting.pop()
            if node.index in seen:
                continue
            seen.add(node.index)
            if isinstance(node.operation, ReadSource) and not node.operation.spec.bounded:
                return True
            waiting += [one.node for one in node.inputs]
        return False

    def claim_uid(self, uid: str, node: Node) -> None:
        """Notes that ``node`` has this uid.

        Raises:
            JobRejected: another operator of the job has it.
        """
        owner = self._uids.setdefault(uid, node)
        if owner is not node:
            raise JobRejected(
                f"uid {uid!r} is already that of operator {owner.name!r}: a uid names one operator's "
                "state, so it must be unique within the job"
            )

    def reject(self, error: StreamError) -> None:
        """Forgets the job, which was rejected: the next one is none the worse for it."""
        for rows in self.collected:
            rows.reject(error)
        self.start_next_job()

    def start_next_job(self) -> None:
        """Forgets the sinks of the job that was submitted, or rejected; its streams stay usable."""
        self.sinks = []
        self.collected = []
        self._uids = {}
