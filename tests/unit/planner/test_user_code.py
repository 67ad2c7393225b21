"""Aim: what the user defines reaches another process, and what cannot is named.

Method: small projects are written to a directory and run as scripts in a process of their own; what they
would ship is unpacked and unpickled in yet another one, which has never seen the directory.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from penstock.client.artifacts import CODE, LocalArtifact, zip_bytes
from penstock.client.code_shipping import collect_code, import_paths
from penstock.errors import JobRejected
from penstock.functions.user_code import display_name, pickle_function

ROOT = Path(__file__).parents[3]

SCRIPT = """
import json, sys
import helper, pkg.deep.inner, spread.part
from penstock.client.code_shipping import collect_code
from penstock.functions.user_code import pickle_function, shipping

FACTOR = 3

def triple(row):
    return helper.add(row * FACTOR) + pkg.deep.inner.ONE + spread.part.TWO

code = collect_code()
with shipping(code.roots):
    function = pickle_function(triple, operator="map")
    by_reference = pickle_function(helper.add, operator="map")
print(json.dumps({
    "artifacts": [[a.id, a.name, bytes(a.data).hex()] for a in code.artifacts],
    "pickled": function.pickled.hex(),
    "by_reference": by_reference.pickled.hex(),
    "name": function.display_name,
}))
"""

RUN = """
import sys, json, pickle
sys.path.insert(0, sys.argv[1])
print(pickle.loads(bytes.fromhex(sys.argv[2]))(10))
"""


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def python(*arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=check,
        timeout=60,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    write(directory / "helper.py", "def add(x):\n    return x + 1000\n")
    write(directory / "unused.py", "raise RuntimeError('never imported')\n")
    write(directory / "pkg" / "__init__.py")
    write(directory / "pkg" / "deep" / "__init__.py")
    write(directory / "pkg" / "deep" / "inner.py", "ONE = 1\n")
    write(directory / "pkg" / "data.txt", "read with importlib.resources")
    write(directory / "spread" / "part.py", "TWO = 2\n")
    write(directory / ".hidden" / "secret.py", "x = 1\n")
    write(directory / "job.py", SCRIPT)
    return directory


def test_script_and_its_modules_reach_another_process(project: Path, tmp_path: Path) -> None:
    shipped = json.loads(python("job.py", cwd=project).stdout)
    ((artifact_id, name, data),) = shipped["artifacts"]
    archive = write(tmp_path / "elsewhere" / "code.zip")
    archive.write_bytes(bytes.fromhex(data))
    with zipfile.ZipFile(archive) as unpacked:
        names = [name for name in unpacked.namelist() if not name.endswith("/")]
    assert names == [
        "helper.py",
        "pkg/__init__.py",
        "pkg/data.txt",
        "pkg/deep/__init__.py",
        "pkg/deep/inner.py",
        "spread/part.py",
    ]
    assert (name, len(artifact_id)) == ("script.zip", 64)
    assert shipped["name"] == "__main__.triple"
    assert b"helper" in bytes.fromhex(shipped["by_reference"])
    assert len(shipped["by_reference"]) < 200
    result = python("-c", RUN, str(archive), shipped["pickled"], cwd=tmp_path / "elsewhere")
    assert result.stdout.strip() == "1033"


def test_shipping_is_deterministic(project: Path) -> None:
    first = python("job.py", cwd=project).stdout
    for file in project.rglob("*.py"):
        file.touch()
    second = python("job.py", cwd=project).stdout
    assert json.loads(first)["artifacts"] == json.loads(second)["artifacts"]


@pytest.mark.parametrize("module", ["common", "jobmanager", "taskmanager"])
def test_modules_that_are_called_like_ours_are_shipped(tmp_path: Path, module: str) -> None:
    write(tmp_path / f"{module}.py")
    text = (
        f"import {module}\nfrom penstock.client.code_shipping import collect_code\n"
        "print(len(collect_code().artifacts))\n"
    )
    write(tmp_path / "job.py", text)
    assert python("job.py", cwd=tmp_path).stdout == "1\n"


def test_py_files_are_shipped_as_archives(tmp_path: Path) -> None:
    single = write(tmp_path / "single.py", "x = 1\n")
    write(tmp_path / "lib" / "top.py")
    write(tmp_path / "package" / "__init__.py")
    ready = tmp_path / "ready.zip"
    ready.write_bytes(zip_bytes({"inside.py": b""}))
    paths = [single, tmp_path / "lib", tmp_path / "package", ready]
    assert import_paths(paths) == [str(tmp_path), str(tmp_path / "lib"), str(ready)]
    artifacts = collect_code(paths).artifacts
    contents = [zipfile.ZipFile(io.BytesIO(bytes(a.data))).namelist() for a in artifacts]
    assert contents == [
        ["single.py"],
        ["top.py"],
        ["package/", "package/__init__.py"],
        ["inside.py"],
    ]
    assert {artifact.kind for artifact in artifacts} == {CODE}


def test_bad_py_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobRejected, match=r"gone\.py does not exist"):
        collect_code([tmp_path / "gone.py"])
    with pytest.raises(JobRejected, match=r"is no directory, \.py or"):
        collect_code([write(tmp_path / "notes.txt")])
    with pytest.raises(JobRejected, match="is no readable zip"):
        collect_code([write(tmp_path / "broken.zip", "no zip")])
    write(tmp_path / "y" / "penstock" / "__init__.py")
    with pytest.raises(JobRejected, match="'penstock' would shadow"):
        collect_code([tmp_path / "y"])
    bad = tmp_path / "bad.zip"
    bad.write_bytes(zip_bytes({"penstock/__init__.py": b""}))
    with pytest.raises(JobRejected, match="'penstock' would shadow"):
        collect_code([bad])
    write(tmp_path / "z" / "fast.so")
    with pytest.raises(JobRejected, match=r"compiled code.*--requirements"):
        collect_code([tmp_path / "z"])


def test_zip_bytes_depend_on_the_content_only() -> None:
    one = zip_bytes({"b.py": b"1", "a.py": b"2"})
    two = zip_bytes({"a.py": b"2", "b.py": b"1"})
    assert one == two
    assert (
        LocalArtifact.of(one, name="x", kind=CODE).id
        == LocalArtifact.of(two, name="y", kind=CODE).id
    )


def test_artifact_chunks_are_the_content() -> None:
    artifact = LocalArtifact.of(bytes(range(10)), name="x", kind=CODE)
    assert list(artifact.chunks(4)) == [b"\0\1\2\3", b"\4\5\6\7", b"\x08\x09"]
    assert list(LocalArtifact.of(b"", name="x", kind=CODE).chunks(4)) == [b""]


LOCK = threading.Lock()


class Model:
    def __init__(self) -> None:
        self.settings = {"connection": threading.Lock()}

    def __call__(self, row: Any) -> Any:
        return row


def test_what_cannot_travel_is_named() -> None:
    connection = threading.Lock()

    def with_closure(row: Any) -> Any:
        return connection and row

    def with_global(row: Any) -> Any:
        return LOCK and row

    cases: list[tuple[object, str]] = [
        (
            with_closure,
            r"operator 'score'.*the variable 'connection' in its closure \(_thread.lock\)",
        ),
        (with_global, r"the global variable 'LOCK' \(_thread.lock\) cannot travel"),
        (Model(), r"item 'connection' \(_thread.lock\) of attribute 'settings' \(dict\)"),
        (partial(max, connection), r"argument 0 \(_thread.lock\)"),
    ]
    for function, message in cases:
        with pytest.raises(JobRejected, match=message):
            pickle_function(function, operator="score")


def test_functions_of_modules_that_are_not_shipped_go_by_value(tmp_path: Path) -> None:
    def local(row: int) -> int:
        return helper_of_this_module(row)

    function = pickle_function(local, operator="map")
    assert function.display_name.endswith("local")
    run = "import sys, pickle\nprint(pickle.loads(bytes.fromhex(sys.argv[1]))(1))\n"
    assert python("-c", run, function.pickled.hex(), cwd=tmp_path).stdout.strip() == "43"
    assert cloudpickle.list_registry_pickle_by_value() == set()


def helper_of_this_module(value: int) -> int:
    return value + 42


def test_code_keeps_its_file_by_value_as_well(tmp_path: Path) -> None:
    """A traceback in a slot shows the lines of a function, and of one that it makes."""
    script = tmp_path / "notebook.py"
    script.write_text(
        "def outer():\n    def inner():\n        raise ValueError\n    return inner\n"
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    outer = cloudpickle.loads(pickle_function(names["outer"], operator="map").pickled)
    assert outer.__code__.co_filename == str(script)
    assert outer().__code__.co_filename == str(script)


def test_display_names() -> None:
    assert display_name(helper_of_this_module).endswith("helper_of_this_module")
    assert display_name(partial(helper_of_this_module, 1)).endswith("helper_of_this_module")
    assert display_name(Model()).endswith(".Model")
    assert display_name(len) == "builtins.len"
