"""Asking for memory before it is its turn: for loops that go through memory in the order of keys."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, data: Any, position: Any) -> Any:  # noqa: ARG001
    """Asks for the memory of a value of an array, which may end before it; waits for nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), pointer)
        kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        builder.call(
            function, [address, flag(0), flag(3), flag(1)]
        )  # to read, into all caches, data
        return context.get_dummy_value()

    return types.void(data, types.int64), generate
