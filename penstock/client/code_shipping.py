"""Which modules of the user's are shipped with a job, and as what.

The modules a script imports from its own directory (with everything else in their packages) and the
``--py-files`` become zip artifacts that go on the slots' ``sys.path``.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from penstock.client.artifacts import CODE, LocalArtifact, zip_bytes
from penstock.errors import JobRejected
from penstock.functions.user_code import script_directory, user_modules

_ARCHIVES = (".zip", ".egg", ".whl")


@dataclass(frozen=True, slots=True)
class ShippedCode:
    """The code that goes with a job.

    Attributes:
        artifacts: zips for ``sys.path``, in order.
        roots: directories and files whose modules the slots will be able to import.
    """

    artifacts: tuple[LocalArtifact, ...]
    roots: tuple[Path, ...]


def collect_code(py_files: Sequence[Path] = ()) -> ShippedCode:
    """The script's own modules that are imported now, and the ``--py-files``.

    Raises:
        JobRejected: a file cannot be read or shipped, or would shadow ``penstock``.
    """
    artifacts: list[LocalArtifact] = []
    roots: list[Path] = []
    for path in py_files:
        artifacts.append(_py_file(path))
        roots.append(path.resolve())
    directory = script_directory()
    if directory is not None:
        files = _script_modules(directory, shipped=roots)
        if files:
            _refuse_shadowing(files, where=str(directory))
            artifacts.append(LocalArtifact.of(zip_bytes(files), name="script.zip", kind=CODE))
        roots.append(directory)
    unique = {artifact.id: artifact for artifact in artifacts}
    return ShippedCode(tuple(unique.values()), tuple(roots))


def import_paths(py_files: Sequence[Path]) -> list[str]:
    """What makes the ``--py-files`` importable in this process: entries for ``sys.path``."""
    found = []
    for path in py_files:
        is_inside = path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists())
        found.append(str(path.resolve().parent if is_inside else path.resolve()))
    return list(dict.fromkeys(found))


def _script_modules(directory: Path, *, shipped: Sequence[Path]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    packed: set[Path] = set()
    for name, _, file in user_modules():
        if not file.is_relative_to(directory):
            continue
        if any(file.is_relative_to(root) for root in shipped):
            continue
        depth = name.count(".") + (1 if file.stem == "__init__" else 0)
        root = file.parents[depth]
        if depth == 0:
            _refuse_compiled(file)
            files[file.name] = _read(file)
            continue
        package = root / name.partition(".")[0]
        if package not in packed:
            packed.add(package)
            files.update(_tree(package, root))
    return files


def _py_file(path: Path) -> LocalArtifact:
    if not path.exists():
        raise JobRejected(f"--py-files: {path} does not exist")
    if path.is_dir():
        is_package = (path / "__init__.py").exists()
        files = _tree(path, path.resolve().parent if is_package else path)
        name = f"{path.resolve().name}.zip"
    elif path.suffix == ".py":
        files, name = {path.name: _read(path)}, f"{path.stem}.zip"
    elif path.suffix in _ARCHIVES:
        return _archive(path)
    else:
        raise JobRejected(f"--py-files: {path} is no directory, .py or {', '.join(_ARCHIVES)} file")
    _refuse_shadowing(files, where=str(path))
    return LocalArtifact.of(zip_bytes(files), name=name, kind=CODE)


def _archive(path: Path) -> LocalArtifact:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise JobRejected(f"--py-files: {path} is no readable zip: {error}") from error
    _refuse_shadowing(names, where=str(path))
    return LocalArtifact.of(_read(path), name=path.name, kind=CODE)


def _tree(directory: Path, root: Path) -> dict[str, bytes]:
    """Every file below ``directory``, named relative to ``root``; caches and hidden ones left out."""
    directory, root = directory.resolve(), root.resolve()
    files = {}
    for file in sorted(directory.rglob("*")):
        relative = file.relative_to(root)
        if not file.is_file() or any(
            p.startswith(".") or p == "__pycache__" for p in relative.parts
        ):
            continue
        _refuse_compiled(file)
        files[relative.as_posix()] = _read(file)
    return files


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise JobRejected(f"{file} cannot be read to be shipped: {error.strerror}") from error


def _refuse_compiled(file: Path) -> None:
    if any(file.name.endswith(suffix) for suffix in EXTENSION_SUFFIXES):
        raise JobRejected(
            f"{file} is compiled code, which cannot be imported from a shipped archive; install it "
            "where the TaskManagers run and name it in --requirements"
        )


def _refuse_shadowing(names: Iterable[str], *, where: str) -> None:
    for name in names:
        top, slash, _ = name.partition("/")
        module = top if slash else top.partition(".")[0]
        if module == "penstock":
            raise JobRejected(
                f"{where}: a module named {module!r} would shadow the package that jobs import; rename it"
            )
