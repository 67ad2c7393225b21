"""How the rows of other operators come to one: what the planner knows of it before there is an edge."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph.logical import ANY_ROUTING, NodeInput, Routing
from penstock.pb import graph_pb2
from penstock.planner.draft import DraftOutput


@dataclass(frozen=True, slots=True)
class Way:
    """How rows get to an operator.

    Attributes:
        source: where they come from, unions that are seen through left out.
        exchange: the type that is wanted of the exchange, None = the operators on the way say nothing.
        routing: how they are routed.
        is_first: they are history.
        keys_of_updates: of what comes this way, or else of all that comes behind a union; by these updates are dealt out.
    """

    source: NodeInput
    exchange: graph_pb2.ResultPartitionType.ValueType | None
    routing: Routing = ANY_ROUTING
    is_first: bool = False
    keys_of_updates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """One output that a node reads, unions in between seen through.

    Attributes:
        way: how its rows come.
        position: which of the node's own inputs it stands for.
        target_input: which input of the operator it feeds; the inputs of a union are one.
    """

    output: DraftOutput
    way: Way
    position: int
    target_input: int

    @property
    def routing(self) -> Routing:
        """How its rows are routed."""
        return self.way.routing
