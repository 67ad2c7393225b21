"""Keeps our modules and the user's apart where both are called ``common``, ``jobmanager`` or ``taskmanager``.

User code runs in processes that have loaded ours: slots, and tests that use ``penstock.testing``. Where the user
has a module of such a name, the name is the user's from then on, in ``sys.modules`` and for every import
statement but ours, which go on to see our modules. So pickles, dataclasses and whatever else looks a module up
by its name find the user's. Nothing changes where the user has no such module.

Invariants: our modules of such a name are all loaded before it becomes the user's, so that our imports, at run time
too, find them here and never load anything; a module is ours by the file that its code came from, not by its name.
"""

from __future__ import annotations

import builtins
import importlib
import pkgutil
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from typing_extensions import override

PLAIN_NAMES: Final = ("common", "jobmanager", "taskmanager")
"""Top-level modules of ours that a user may have as well."""

_ROOT: Final = Path(__file__).resolve().parents[2]
_OWN_FILES: Final = tuple(
    f"{root / name}/"
    for root in (_ROOT, Path(__file__).parents[2])
    for name in ("penstock", *PLAIN_NAMES)
)
_lock = threading.RLock()
_apart: set[str] = set()
_ours: dict[str, ModuleType] = {}


def set_apart(loaded: Iterable[str] = ()) -> None:
    """Gives the user the names that are also those of modules on ``sys.path``, or of modules loaded from elsewhere.

    Args:
        loaded: packages of ours that this process needs, though it has not loaded them yet.
    """
    with _lock:
        names = [name for name in PLAIN_NAMES if _is_to_part(name, loaded)]
        if not names:
            return
        _apart.difference_update(names)  # while ours are loaded
        theirs = {
            name: module
            for name, module in list(sys.modules.items())
            if _top(name) in names and not _is_ours(vars(module))
        }
        for name in theirs:
            del sys.modules[name]
        _load_all([name for name in names if name in sys.modules or name in loaded])
        own = {name: module for name, module in sys.modules.items() if _top(name) in names}
        _ours.update(own)
        for name in own:
            if _is_defined(name):
                del sys.modules[name]
        sys.modules.update(theirs)
        _part(names)


def set_apart_beside_script() -> None:
    """Gives ``python job.py`` the packages without ``__init__`` that lie beside it and are called as ours are.

    Python would take our packages, which have one, whatever the order of ``sys.path``.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is None or main.__spec__ is not None or sys.flags.safe_path:
        return
    directory = Path(script).resolve().parent
    names = [
        name
        for name in PLAIN_NAMES
        if name not in sys.modules and directory != _ROOT and _is_namespace(directory / name)
    ]
    if names:
        with _lock:
            _part(names)


def _is_to_part(name: str, loaded: Iterable[str]) -> bool:
    if name in _apart:
        return name in loaded and name not in _ours
    return _is_users(name)


def _part(names: Iterable[str]) -> None:
    if not any(isinstance(finder, _UsersFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _UsersFinder())
        builtins.__import__ = _importing(builtins.__import__)
    _apart.update(names)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _is_ours(namespace: Mapping[str, Any]) -> bool:
    """Whether it is the namespace of a module of ours."""
    file = namespace.get("__file__")
    return isinstance(file, str) and file.startswith(_OWN_FILES)


def _is_users(name: str) -> bool:
    loaded = sys.modules.get(name)
    return (loaded is not None and not _is_ours(vars(loaded))) or _is_defined(name)


def _locations() -> list[str]:
    """Where modules of the user's may be: everywhere but where ours are."""
    return [path for path in sys.path if Path(path).resolve() != _ROOT]


def _is_defined(name: str) -> bool:
    """Whether there is code of the user's for a module of this name; a directory of something else is none."""
    for location in _locations():
        path = Path(location, *name.split("."))
        if path.with_name(f"{path.name}.py").is_file() or (path / "__init__.py").is_file():
            return True
        if _is_namespace(path) or _is_in_archive(location, "/".join(name.split("."))):
            return True
    return False


def _is_in_archive(location: str, name: str) -> bool:
    if not Path(location).is_file():
        return False
    files = _files_of_archive(location)
    return f"{name}.py" in files or any(
        file.startswith(f"{name}/") and file.endswith(".py") for file in files
    )


@cache
def _files_of_archive(location: str) -> frozenset[str]:
    """What a zip on ``sys.path`` holds; nothing where it is none."""
    try:
        with zipfile.ZipFile(location) as archive:
            return frozenset(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return frozenset()


def _is_namespace(path: Path) -> bool:
    """Whether it is a package without ``__init__``."""
    if (path / "__init__.py").is_file() or path.with_name(f"{path.name}.py").is_file():
        return False
    return path.is_dir() and (any(path.glob("*.py")) or any(path.glob("*/*.py")))


def _load_all(packages: Sequence[str]) -> None:
    sys.path.insert(0, str(_ROOT))
    try:
        for name in packages:
            package = importlib.import_module(name)
            for found in pkgutil.walk_packages(package.__path__, f"{name}."):
                if not found.name.endswith(".__main__"):
                    importlib.import_module(found.name)
    finally:
        sys.path.remove(str(_ROOT))


class _UsersFinder(MetaPathFinder):
    """Finds the user's modules, also those that have no ``__init__``, which a module of ours would outdo."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname not in _apart:
            return None
        return PathFinder.find_spec(fullname, _locations(), target)


def _importing(original: Callable[..., Any]) -> Callable[..., Any]:
    """What import statements call from now on."""

    def import_module(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        # A list comes from C code, pickle's for example, which looks for the user's classes in our name.
        if globals is not None and not isinstance(fromlist, list) and _is_ours(globals):
            absolute = resolve_name("." * level + name, globals["__package__"]) if level else name
            if _top(absolute) in _apart:
                return _own(absolute, fromlist or (), is_relative=level > 0)
        return original(name, globals, locals, fromlist, level)

    return import_module


def _own(name: str, fromlist: Sequence[str], *, is_relative: bool) -> ModuleType:
    """What an import statement of ours is given; it takes the names of ``fromlist`` from it."""
    module = _ours.get(name)
    if module is None:
        raise ModuleNotFoundError(f"No module named {name!r} among Penstock's own", name=name)
    if not fromlist and not is_relative:
        return _ours[_top(name)]
    for wanted in fromlist:
        inner = _ours.get(f"{name}.{wanted}")
        if inner is not None and not hasattr(module, wanted):
            setattr(module, wanted, inner)
    return module
