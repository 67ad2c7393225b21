"""How kernels are compiled: for fixed signatures, once per machine, kept on disk.

A kernel is compiled or loaded from the cache when its module is imported (``warm_up``), so never in
the middle of a task, and never for a type that was not foreseen. Inputs are declared read-only,
which accepts writable arrays too; so one compilation serves Arrow's memory and ours.

Where it is kept, and which changes make it new: ``kernel_cache``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types

from penstock.loops.kept_code import compiled_and_kept
from taskmanager.kernels.kernel_cache import kept_in, kernel_directory

F = TypeVar("F", bound=Callable[..., Any])

INT64 = types.int64
TWO_INT64 = types.UniTuple(types.int64, 2)
UINT32 = types.uint32
UINT64 = types.uint64
BOOL = types.boolean
VOID = types.void

INT64S_IN = types.Array(types.int64, 1, "C", readonly=True)
UINT64S_IN = types.Array(types.uint64, 1, "C", readonly=True)
UINT16S_IN = types.Array(types.uint16, 1, "C", readonly=True)
FLOAT64S_IN = types.Array(types.float64, 1, "C", readonly=True)
BYTES_IN = types.Array(types.uint8, 1, "C", readonly=True)
BOOLS_IN = types.Array(types.boolean, 1, "C", readonly=True)
RECORDS_IN = types.Array(types.int64, 2, "C", readonly=True)

INT64S = types.int64[::1]
UINT64S = types.uint64[::1]
BYTES = types.uint8[::1]
BOOLS = types.boolean[::1]
RECORDS = types.int64[:, ::1]
UINT64_RECORDS = types.uint64[:, ::1]
FLOAT64_RECORDS = types.float64[:, ::1]


def kernel(signature: Any, *, nogil: bool = False) -> Callable[[F], F]:
    """Compiles a function for fixed signatures.

    A kernel allocates nothing, so that no references are counted: numba would count those of every array
    in every row of many a loop, which takes several times as long as the row. One that allocates is not compiled.

    Args:
        signature: numba signature, or a list of them.
        nogil: releases the interpreter lock while the kernel runs: for those that may take long.
    """

    def compile_(function: F) -> F:
        options = {"nogil": nogil, "_nrt": False}
        directory = kernel_directory()
        if directory is None:
            return cast("F", numba.njit(signature, **options)(function))
        with kept_in(directory):
            return cast("F", compiled_and_kept(function, signature, **options))

    return compile_


def inlined(function: F) -> F:
    """Marks a function that kernels call; it is compiled into each of them."""
    return cast("F", numba.njit(inline="always")(function))
