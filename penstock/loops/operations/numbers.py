"""Numbers as compiled code has them: those that may be missing, and what an error of a row is noted in.

Each name that loops call is a stand-in whose overloads are chosen by types. None of them raises: the first error of a row
is put where ``errors`` says (kind, line), and what is given back then is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import types
from numba.core import errors as numba_errors
from numba.extending import intrinsic, overload

from penstock.loops.row_errors import RowErrorKind

MARK: Final = "\N{SECTION SIGN}"
"""Around what a refusal says to people, within what numba says."""

NONE: Final = int(RowErrorKind.NONE)


def family(kind: Any) -> str:
    """What a type is to a user: "int", "float", "bool", "none", or "" for all else."""
    if isinstance(kind, types.Optional):
        kind = kind.type
    if isinstance(kind, types.Omitted):
        return ""
    kind = types.unliteral(kind)
    if isinstance(kind, types.Boolean):
        return "bool"
    if isinstance(kind, types.Integer):
        return "int"
    if isinstance(kind, types.Float):
        return "float"
    return "none" if isinstance(kind, types.NoneType) else ""


def refused(what: str) -> Any:
    """Says why types are not taken; numba passes it on."""
    raise numba_errors.TypingError(f"{MARK}{what}{MARK}")


def are_integers(what: str, *kinds: Any) -> bool:
    """Whether all are integers (True) or one is a float; else it is refused."""
    families = [family(kind) for kind in kinds]
    if not all(families):
        refused(f"{what} takes numbers")
    return "float" not in families


@intrinsic  # type: ignore[untyped-decorator]
def present(_context: Any, value: Any) -> Any:
    """A value of an optional type that is known to be there."""
    inner = value.type if isinstance(value, types.Optional) else value

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        (given,) = arguments
        if isinstance(value, types.Optional):
            return context.make_helper(builder, value, value=given).data
        return given

    return inner(value), code


# Errors are two int64 at an address: an array would be counted as used around each operation, which costs more than it.


@intrinsic  # type: ignore[untyped-decorator]
def fail(_context: Any, errors: Any, kind: Any, line: Any) -> Any:
    """Notes an error of the row, unless there is one."""

    def code(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, kind_of, line_of = arguments
        place = builder.inttoptr(address, target.get_value_type(types.int64).as_pointer())
        zero, one = (target.get_constant(types.int64, number) for number in (0, 1))
        with builder.if_then(builder.icmp_signed("==", builder.load(place), zero), likely=True):
            builder.store(kind_of, place)
            builder.store(line_of, builder.gep(place, [one]))

    return types.void(types.int64, types.int64, types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def has_failed(_context: Any, errors: Any) -> Any:
    """Whether the row has an error."""

    def code(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], target.get_value_type(types.int64).as_pointer())
        return builder.icmp_signed("!=", builder.load(place), target.get_constant(types.int64, 0))

    return types.boolean(types.int64), code


def stand_in(name: str) -> Callable[..., Any]:
    """A name that loops call, for overloads to stand behind."""

    def only_compiled(*_arguments: Any) -> Any:
        raise NotImplementedError(name)

    only_compiled.__name__ = only_compiled.__qualname__ = name
    return only_compiled


number = stand_in("number")
truth = stand_in("truth")
integer = stand_in("integer")


@overload(number, strict=False)  # type: ignore[untyped-decorator]
def _number(value: Any, errors: Any, line: Any) -> Any:
    """A number that is there, as int64 or float64."""
    given_as = family(value)
    if not given_as:
        return refused("arithmetic takes numbers")
    if given_as == "none":

        def of_none(value: Any, errors: Any, line: Any) -> Any:
            fail(errors, NONE, line)
            return np.int64(0)

        return of_none
    wide = np.float64 if given_as == "float" else np.int64
    if isinstance(value, types.Optional):

        def of_optional(value: Any, errors: Any, line: Any) -> Any:
            if value is None:
                fail(errors, NONE, line)
                return wide(0)
            return wide(present(value))

        return of_optional
    return lambda value, errors, line: wide(value)


@overload(truth, strict=False)  # type: ignore[untyped-decorator]
def _truth(value: Any) -> Any:
    """``bool(value)``."""
    given_as = family(value)
    if not given_as:
        return refused("a condition is made of numbers and booleans")
    if given_as == "none":
        return lambda value: False
    if isinstance(value, types.Optional):

        def of_optional(value: Any) -> Any:
            if value is None:
                return False
            return present(value) != 0

        return of_optional
    return lambda value: value != 0


@overload(integer, strict=False)  # type: ignore[untyped-decorator]
def _integer(value: Any, errors: Any, line: Any) -> Any:
    """An integer that is there: of a range, a timer."""
    if family(value) not in ("int", "bool", "none"):
        return refused("range() and timers take integers: write int(...)")
    return lambda value, errors, line: number(value, errors, line)
