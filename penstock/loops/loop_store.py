"""Compiles loops, and keeps what numba makes of them in files beside other kernels.

A loop lies in a file of its own, named by its content and by the version of what it calls, in ``NUMBA_CACHE_DIR`` or the
user's cache; so a function is compiled once per machine, whichever job it runs in.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from penstock.loops.dialect import NotCompilable
from penstock.loops.kept_code import compiled_and_kept, user_cache
from penstock.loops.loop_expressions import OWN
from penstock.pb import graph_pb2
from penstock.storage.private_directories import make_private

Loop = Callable[..., tuple[Any, ...]]

_REFUSED = re.compile("\N{SECTION SIGN}(.+?)\N{SECTION SIGN}", re.DOTALL)
_LINE = re.compile(r'File ".*loop_[0-9a-f]+\.py", line (\d+)')
_DIGEST_LENGTH: Final = 24


def compiled_loop(spec: graph_pb2.CompiledLoop) -> Loop:
    """The machine code of a loop, compiled or loaded.

    Raises:
        NotCompilable: numba does not take it; the message says the user's line and why.
    """
    from numba import njit
    from numba.core import errors

    signature = _signature(spec)
    try:
        function = _function(spec.source)
        if why := _refused(function):
            raise NotCompilable(why)
        try:
            loop = compiled_and_kept(function, signature, nogil=True)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            loop = njit(signature, nogil=True)(function)
    except errors.NumbaError as error:
        raise _refusal(spec, str(error)) from error
    mixed = _mixed_name(loop, spec)
    if mixed:
        why = (
            f"{mixed} is sometimes an integer, sometimes a number with fractions or a boolean: let it be one of them "
            "throughout, as 0.0 is for 0"
        )
        note = _note_of(function)
        if Path(function.__code__.co_filename).exists():
            _write(note, why)
        raise NotCompilable(why)
    return loop


def _mixed_name(loop: Any, spec: graph_pb2.CompiledLoop) -> str:
    """A variable, with its line, that numba would take for one type though it is given several; "" = there is none.

    What comes from the cache has been looked at when it was compiled.
    """
    from penstock.loops.operations.numbers import family

    (compiled,) = loop.overloads.values()
    if not hasattr(compiled.type_annotation, "typemap"):
        return ""
    types_of: dict[str, set[str]] = {}
    for name, kind in compiled.type_annotation.typemap.items():
        base = _unversioned(name)
        if base.startswith("$phi") or not base.startswith((OWN, "$", "arg.")):
            types_of.setdefault(base, set()).add(family(kind))
    mixed = {name for name, kinds in types_of.items() if len(kinds & {"int", "float", "bool"}) > 1}
    for block in compiled.type_annotation.blocks.values():
        for statement in block.body:
            target = getattr(getattr(statement, "target", None), "name", "")
            base = _unversioned(target)
            if base in mixed:
                shown = f"{base!r}" if not base.startswith("$") else "what is chosen here"
                return f"line {spec.lines[statement.loc.line - 1]}: {shown}"
    return ""


def _unversioned(name: str) -> str:
    """What numba's names of one variable have in common: ``x`` and ``x.1``, ``$phi26.0`` and ``$phi26.0.1``."""
    parts = name.split(".")
    return ".".join(parts[: 2 if name.startswith(("$", "arg.")) else 1])


def _note_of(function: Any) -> Path:
    """Where it is kept that a loop is refused: what numba has compiled of it is kept as well, and looked at no more."""
    return Path(function.__code__.co_filename).with_suffix(".refused")


def _refused(function: Any) -> str:
    """Why this loop was refused before; "" = it was not."""
    try:
        return _note_of(function).read_text()
    except FileNotFoundError:
        return ""


def _signature(spec: graph_pb2.CompiledLoop) -> tuple[Any, ...]:
    """Types of the arguments of ``loop``, in their order."""
    from numba import types

    def array(kind: str, *, is_written: bool = False) -> Any:
        item = types.boolean if kind == "bool" else getattr(types, kind)
        return types.Array(item, 1, "C", readonly=not is_written)

    arguments = [types.int64, types.int64, array("int64"), array("int64"), types.int64, types.int64]
    arguments += [types.int64, types.int64]
    for column in spec.columns:
        arguments += [array(column.kind), array("bool")]
    for state in spec.states:
        kinds = (state.kind, "bool", "bool")
        arguments += [array(kind, is_written=True) for kind in kinds]
    return tuple(arguments)


def _function(source: str) -> Any:
    """``loop`` of the source, from its file."""
    digest = hashlib.sha256((_version_of_operations() + source).encode()).hexdigest()
    name = f"loop_{digest[:_DIGEST_LENGTH]}"
    known = sys.modules.get(name)
    if known is not None:
        return known.loop
    path = _directory() / f"{name}.py"
    try:
        _write(path, source)
    except OSError as error:
        warnings.warn(
            f"compiled functions are kept nowhere ({error}): every process compiles them anew, which takes seconds; set "
            "NUMBA_CACHE_DIR to a writable directory",
            RuntimeWarning,
            stacklevel=2,
        )
        names: dict[str, Any] = {"__name__": name}
        exec(compile(source, str(path), "exec"), names)
        return names["loop"]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # numba finds it there when it loads what it has compiled
    spec.loader.exec_module(module)
    return module.loop


def _directory() -> Path:
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        return Path(given) / "loops"
    return user_cache("loops")


def _write(path: Path, text: str) -> None:
    """Puts a text where it is kept: whole, and only where it is not there as it should be."""
    try:
        if path.read_text() == text:
            return
    except FileNotFoundError:
        make_private(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".loop-")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(temporary).rename(path)


@cache
def _version_of_operations() -> str:
    """What numba does not see change: the code that is compiled into loops, and how they are kept."""
    import numba

    from penstock.loops import operations

    folder = Path(operations.__file__).parent
    beside = [folder.parent / name for name in ("prefetch.py", "row_errors.py", "checked_code.py")]
    files = [*beside, *sorted(folder.glob("*.py"))]
    texts = [file.read_text() for file in files]
    return "\n".join([str(numba.__version__), *texts])


def _refusal(spec: graph_pb2.CompiledLoop, text: str) -> NotCompilable:
    """What numba says, in the user's terms."""
    place = [int(number) for number in _LINE.findall(text)]
    line = spec.lines[place[-1] - 1] if place and place[-1] <= len(spec.lines) else 0
    own = _REFUSED.search(text)
    if own is not None:
        why = own.group(1)
    elif "unify" in text.lower():
        why = "a variable has different types here: let it be an integer, a number with fractions or a boolean throughout"
    else:
        why = " ".join(text.split())[:400]
    return NotCompilable(f"line {line}: {why}")
