"""What an environment collects while the user builds a job: nodes, sinks, uids, collected rows."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from penstock.collected import CollectedRows
from penstock.errors import JobRejected
from penstock.logical import Node, NodeInput, Operation, WriteSink


class JobBuilder:
    """The job under construction.

    Args:
        run: runs the job that has been built; called by rows that are read before it was.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
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
        """A new node; a sink becomes part of the job at once, others when a sink reads from them."""
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

    def collect(self, schema: pa.Schema, limit: int) -> CollectedRows:
        """The rows of a new collect sink of this job."""
        rows = CollectedRows(f"collect-{len(self.collected)}", schema, limit, self._run)
        self.collected.append(rows)
        return rows

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

    def start_next_job(self) -> None:
        """Forgets the sinks of the job that was submitted; its streams stay usable."""
        self.sinks = []
        self.collected = []
        self._uids = {}
