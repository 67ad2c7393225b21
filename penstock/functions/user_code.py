"""The user's functions on their way to the slots: what is pickled, how, and what cannot be.

Functions travel as cloudpickle. What the script itself defines goes by value, and so does every module
of the user's that is neither installed nor shipped (a notebook, a test); modules that are shipped
(``penstock.client.code_shipping``) or installed go by reference. The JobManager unpickles nothing: slots do that, and
this module where a function is tried on rows, so that the job does not begin with what the trial has left in it. Code
keeps the name of its file, so that tracebacks show its lines.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import platform
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
from typing_extensions import override

from penstock.errors import JobRejected
from penstock.pb import graph_pb2

OWN_PACKAGES = frozenset({"penstock", "common", "jobmanager", "taskmanager"})
"""Top-level modules of ours."""

_PICKLING_ERRORS = (
    pickle.PickleError,
    TypeError,
    AttributeError,
    ValueError,
    RuntimeError,
    LookupError,
    OSError,
)
_DIAGNOSIS_DEPTH = 4
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_shipped_roots: ContextVar[tuple[str, ...]] = ContextVar("penstock_shipped_roots", default=())


def python_version() -> str:
    """The Python that pickles are made for, "3.11"."""
    return ".".join(platform.python_version_tuple()[:2])


def cloudpickle_version() -> str:
    """The cloudpickle that pickles are made with."""
    return str(cloudpickle.__version__)


def display_name(function: object) -> str:
    """How a person knows a function or an object of the user's: "module.qualname"."""
    named = function.func if isinstance(function, partial) else function
    if not hasattr(named, "__qualname__"):
        named = type(named)
    return f"{named.__module__}.{named.__qualname__}"


def pickle_function(function: object, *, operator: str) -> graph_pb2.Function:
    """The function (or any object of the user's) as it travels.

    Args:
        function: what the operator calls.
        operator: the operator's name, for the error.

    Raises:
        JobRejected: it cannot be pickled; the message names what in it cannot travel.
    """
    name = display_name(function)
    with _pickled_by_value(_unshipped_modules()):
        try:
            pickled = _pickled(function)
        except _PICKLING_ERRORS as error:
            culprit = _culprit(function, _DIAGNOSIS_DEPTH)
            what = f": {culprit} cannot travel to the slots" if culprit else ""
            raise JobRejected(
                f"operator {operator!r}: {name} cannot be pickled{what} ({error}). Create such "
                "things inside the function, or in open(), where they are needed"
            ) from error
    return graph_pb2.Function(pickled=pickled, display_name=name)


def trial_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function to be called while the job is being built: it shares no variable with the one that will travel.

    What cannot be pickled is returned as it is: the job is refused when it is planned. Modules beside the script are
    not copied, which slots import anew.
    """
    directory = script_directory()
    roots = [Path(root) for root in _shipped_roots.get()] + ([directory] if directory else [])
    try:
        with shipping(roots), _pickled_by_value(_unshipped_modules()):
            copied: Callable[..., Any] = _Apart(io.BytesIO(_pickled(function))).load()
    except Exception:  # noqa: BLE001 - pickling calls the user's code, which may raise anything
        return function
    return copied


class _Apart(pickle.Unpickler):
    """Makes classes of the script anew, which cloudpickle takes for those that are here, and sets their attributes."""

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        if global_name not in ("_make_skeleton_class", "_make_skeleton_enum"):
            return found

        def make(*arguments: Any) -> Any:
            *of_class, _tracker_id, extra = arguments
            bases = next(one for one in of_class if isinstance(one, tuple))
            if any(map(_hears_of_classes, bases)):
                return found(*arguments)
            return found(*of_class, None, extra)

        return make


def _hears_of_classes(base: type) -> bool:
    """True of a registry, say: it is not told of a class once more."""
    hears = getattr(base.__init_subclass__, "__func__", None)
    return hears is not None and hears.__module__ != "typing"


def code_of_file(
    build: Callable[..., CodeType], arguments: tuple[object, ...], filename: str
) -> CodeType:
    """What a pickle calls to make code again, with the file that it came from."""
    return build(*arguments).replace(co_filename=filename)


@contextmanager
def shipping(roots: Iterable[Path]) -> Iterator[None]:
    """Within it, modules whose files lie under ``roots`` are pickled by reference: they are shipped."""
    token = _shipped_roots.set(tuple(str(root) for root in roots))
    try:
        yield
    finally:
        _shipped_roots.reset(token)


@cache
def is_installed(file: str) -> bool:
    """True where the file belongs to Python, to an installed distribution, or to Penstock."""
    path = os.path.realpath(file)
    return path.startswith(_installed_roots()) or any(part in path for part in _PACKAGES)


def script_directory() -> Path | None:
    """Where the running script lies; None in a notebook, a console or a command of a package."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or is_installed(file):
        return None
    return Path(file).resolve().parent


def user_modules() -> list[tuple[str, ModuleType, Path]]:
    """Name, module and file of every imported module that is the user's, sorted by name."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in ("__main__", "__mp_main__") or not isinstance(file, str):
            continue
        if (own := _users_file(file)) is not None:
            found.append((name, module, own))
    return sorted(found, key=itemgetter(0))


@cache
def _users_file(file: str) -> Path | None:
    """The file of a module of the user's, without links; None where it is installed.

    Each function that is pickled asks this of each module, and each link costs a call of the system.
    """
    return None if is_installed(file) else Path(file).resolve()


@cache
def _installed_roots() -> tuple[str, ...]:
    """Directories, each with the separator behind it."""
    keys = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    roots = {os.path.realpath(sysconfig.get_path(key)) for key in keys}
    ours = Path(__file__).resolve().parents[2]
    return tuple(f"{root}{os.sep}" for root in (*sorted(roots), *(ours / p for p in OWN_PACKAGES)))


def _unshipped_modules() -> list[ModuleType]:
    shipped = [Path(root) for root in _shipped_roots.get()]
    return [
        module
        for _, module, file in user_modules()
        if not any(file.is_relative_to(root) for root in shipped)
    ]


def _reduced_code(code: CodeType) -> tuple[object, ...]:
    # From 3.1.3 on cloudpickle names every file "<dynamic-code>", and tracebacks lose their lines.
    build, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return code_of_file, (build, arguments, code.co_filename)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: _reduced_code})


def _pickled(function: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(function)
    return buffer.getvalue()


_registry = threading.RLock()
"""Who holds it changes cloudpickle's list of modules, which there is once per process: jobs may be built in several threads."""


@contextmanager
def _pickled_by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    with _registry:
        already = cloudpickle.list_registry_pickle_by_value()
        added = [
            module
            for module in modules
            if module.__name__ not in already and sys.modules.get(module.__name__) is module
        ]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in added:
                cloudpickle.unregister_pickle_by_value(module)


def _culprit(value: object, depth: int) -> str:
    """The innermost part that cannot be pickled, as words; "" where none of the parts is to blame."""
    for what, part in _parts(value):
        try:
            cloudpickle.dumps(part)
        except _PICKLING_ERRORS:
            inner = _culprit(part, depth - 1) if depth > 1 else ""
            here = f"{what} ({_kind(part)})"
            return f"{inner} of {here}" if inner else here
    return ""


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, partial):
        yield "the function", value.func
        yield from ((f"argument {i}", part) for i, part in enumerate(value.args))
        yield from ((f"argument {name!r}", part) for name, part in value.keywords.items())
    elif inspect.ismethod(value):
        yield "self", value.__self__
    elif inspect.isfunction(value):
        closure = inspect.getclosurevars(value)
        yield from (
            (f"the variable {name!r} in its closure", part)
            for name, part in closure.nonlocals.items()
        )
        yield from (
            (f"the global variable {name!r}", part)
            for name, part in closure.globals.items()
            if not inspect.ismodule(part)
        )
        yield from ((f"default {i}", part) for i, part in enumerate(value.__defaults__ or ()))
    elif isinstance(value, dict):
        yield from ((f"item {key!r}", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {i}", part) for i, part in enumerate(value))
    elif hasattr(value, "__dict__") and not inspect.isclass(value):
        yield from ((f"attribute {name!r}", part) for name, part in vars(value).items())


def _kind(value: object) -> str:
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
