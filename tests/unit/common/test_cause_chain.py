"""Aim: an error that no restart mends is found wherever it is in what came out of a task.

Method: exceptions raised as users raise them, and their names.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import penstock as ps
from common.cause_chain import cause_chain
from taskmanager.user_code.user_failure import user_failure

HERE = __name__


class LicenceExpired(ps.Unrecoverable):
    """The user's own."""


class Unrecoverable(Exception):  # noqa: N818 - the name is the point
    """Of that name by chance."""


def caught(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as raised:
        function()
    return raised.value


def check_licence() -> None:
    raise LicenceExpired("yesterday")


def raise_from() -> None:
    try:
        check_licence()
    except LicenceExpired as error:
        raise ValueError("cannot go on") from error


def raise_while_handling() -> None:
    try:
        raise_from()
    except ValueError:
        {}["key"]


def raise_from_none() -> None:
    try:
        check_licence()
    except LicenceExpired:
        raise ValueError("that is all right") from None


def raise_group() -> None:
    raise ExceptionGroup("several", [KeyError("a"), caught(raise_from)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (raise_from, ["ValueError", "Unrecoverable"]),
        (raise_while_handling, ["KeyError", "ValueError", "Unrecoverable"]),
        (raise_from_none, ["ValueError"]),
        (raise_group, ["ExceptionGroup", "KeyError", "ValueError", "Unrecoverable"]),
    ],
)
def test_the_chain_is_followed(function: Callable[[], object], names: list[str]) -> None:
    assert cause_chain(caught(function)) == names


def test_classes_of_others_are_named_with_their_module() -> None:
    assert cause_chain(Unrecoverable()) == [f"{HERE}.Unrecoverable"]


def test_what_a_function_raised_is_behind_the_failure_of_its_operator() -> None:
    error = LicenceExpired("yesterday")
    failure = user_failure(error, operator="map", function="f", row=1)
    failure.__cause__ = error
    assert cause_chain(failure) == ["TaskFailure", "Unrecoverable"]


def test_cycles_and_long_chains_come_to_an_end() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert cause_chain(first) == ["ValueError", "KeyError"]
    error: BaseException = ValueError()
    for _ in range(100):
        outer = ValueError()
        outer.__cause__ = error
        error = outer
    assert len(cause_chain(error)) == 32


@pytest.mark.parametrize("depth", [31, 32, 33, 5_000])
@pytest.mark.parametrize("link", ["__cause__", "__context__", "exceptions"])
def test_what_no_restart_mends_is_found_at_any_depth(depth: int, link: str) -> None:
    error: BaseException = LicenceExpired("yesterday")
    innermost = error
    for _ in range(depth):
        if link == "exceptions":
            outer: BaseException = BaseExceptionGroup("several", [error])
        else:
            outer = ValueError()
            setattr(outer, link, error)
        error = outer
    innermost.__cause__ = error
    names = cause_chain(error)
    assert names[-1] == "Unrecoverable"
    assert len(names) == min(depth, 32) + 1
