"""The border to user code in connectors: what it raises becomes a TaskFailure with its traceback."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from taskmanager.user_code.user_failure import error_text, user_traceback


@contextmanager
def calling_user_code(what: str, operator: str) -> Iterator[None]:
    """Turns an exception of the user's code into a TaskFailure that carries the traceback.

    Args:
        what: what was called, as the message names it: "generator function rows(0, 10)".
    """
    try:
        yield
    except TaskFailure:
        raise
    except Exception as error:
        raise TaskFailure(
            f"{what} raised {error_text(error)}",
            operator=operator,
            user_traceback=user_traceback(error),
        ) from error


def load_function(function: graph_pb2.Function, operator: str) -> Any:
    """The user's object out of its pickle.

    Raises:
        TaskFailure: it cannot be loaded here, with the traceback.
    """
    with calling_user_code(f"loading {function.display_name or 'a user function'}", operator):
        return pickle.loads(function.pickled)
