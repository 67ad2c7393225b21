"""A user's function in its slot: loaded, opened, called by operators, closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle

from penstock.errors import TaskFailure
from penstock.functions.functions import FunctionContext, close_function, open_function
from penstock.pb import graph_pb2
from penstock.rows.rows import unknown_column
from taskmanager.operators.operator import OperatorContext
from taskmanager.user_code.user_failure import user_failure


class UserFunctionHandle:
    """The function of one operator.

    Attributes:
        function: the user's object, None before ``open`` and after ``close``.
        name: how the user knows it.
    """

    def __init__(self, operator: str, function: graph_pb2.Function) -> None:
        self.function: Any = None
        self.name = function.display_name
        self._operator = operator
        self._pickled = function

    def load(self) -> None:
        """Loads the function, where that has not been done yet.

        Raises:
            TaskFailure: it cannot be loaded here.
        """
        if self.function is None:
            self.function = load_function(self._pickled, self._operator)

    def open(self, context: OperatorContext, prepare: Callable[[Any], None] | None = None) -> None:
        """Loads the function and calls its ``open``, where it has one.

        Args:
            prepare: called with the function before its ``open``.

        Raises:
            TaskFailure: it cannot be loaded here, or its ``open`` raised.
        """
        self.load()
        if prepare is not None:
            prepare(self.function)
        open_user_function(self.function, self.name, context)

    def close(self) -> None:
        """Calls the function's ``close``, where it has one and was loaded."""
        function, self.function = self.function, None
        if function is None:
            return
        try:
            close_function(function)
        except Exception as error:
            raise self.failure(error, method="close") from error

    def failure(self, error: BaseException, *, row: object = None, method: str = "") -> TaskFailure:
        """What the function raised, as a failure with the user's traceback.

        Args:
            row: what it was called with, None where there is no row.
            method: of the function, "" when it was called itself.
        """
        name = f"{self.name}.{method}" if method else self.name
        return _failure(error, self._operator, name, row)


def load_function(function: graph_pb2.Function, operator: str) -> Any:
    """The user's object.

    Raises:
        TaskFailure: it cannot be loaded here.
    """
    try:
        return cloudpickle.loads(function.pickled)
    except Exception as error:
        raise TaskFailure(
            f"operator {operator!r}: {function.display_name} cannot be loaded on the TaskManager: "
            f"{type(error).__name__}: {error}; ship the modules it needs with --py-files, or "
            "install them on every TaskManager",
            operator=operator,
        ) from error


def open_user_function(function: object, name: str, context: OperatorContext) -> None:
    """Calls the function's ``open``, where it has one.

    Raises:
        TaskFailure: it raised.
    """
    place = FunctionContext(
        job_name=context.job_name,
        operator_name=context.operator_name,
        subtask_index=context.subtask_index,
        parallelism=context.parallelism,
        attempt=context.attempt,
    )
    try:
        open_function(function, place)
    except Exception as error:
        raise _failure(error, context.operator_name, f"{name}.open", None) from error


def _failure(error: BaseException, operator: str, function: str, row: object) -> TaskFailure:
    failure = user_failure(error, operator=operator, function=function, row=row)
    if failure is error:
        return failure
    hint = unknown_column(error)
    if hint:
        failure.args = (f"operator {operator!r}: {function}: {hint}",)
    if row is None:
        failure.row = ""
    failure.__cause__ = error
    return failure
