"""Which column of a source event time is taken from (pure)."""

from __future__ import annotations

from penstock.expressions.nodes import plain_column
from penstock.pb import graph_pb2


def _column_before(operator: graph_pb2.Operator, name: str) -> str:
    """The column of an operator's input that one of its output is; "" where it may be another."""
    match operator.WhichOneof("spec"):
        case "source" | "filter" | "pass":
            return name
        case "project":
            for column in operator.project.columns:
                if column.name == name:
                    return plain_column(column.expression)
        case _:
            pass
    return ""


def event_time_column(operators: list[graph_pb2.Operator]) -> str:
    """The source's column that event time is taken from, "" where that is not one plain column of it."""
    columns = set()
    for operator in operators:
        if operator.WhichOneof("spec") != "event_time":
            continue
        column = operator.event_time.column
        parent = operator
        while parent.HasField("input"):
            parent = operators[parent.input.operator_index]
            column = _column_before(parent, column)
            if not column:
                return ""
        columns.add(column)
    return columns.pop() if len(columns) == 1 else ""
