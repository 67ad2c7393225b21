"""Aim: warm-up leaves a process that may fork, and every kernel ready. Method: child processes."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numba
import pytest

from penstock.loops.kept_code import compiled_and_kept
from taskmanager.kernels import kernel_cache
from taskmanager.kernels.backend import enter_alone
from taskmanager.kernels.compiled import Kernels
from tests.support.examples import RUNS_ALL
from tests.support.kernel_twins import kernels as twins

ROOT = Path(__file__).parents[3]

PROBE = """
import os, sys
import taskmanager.kernels as kernels
assert "numba" not in sys.modules, "importing the package must not import the compiler"
kernels.warm_up()
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
assert "numba" in sys.modules
"""


SUM = "from taskmanager.kernels.compiled_checksum import weighted_sum as s; import numpy; print(s(numpy.ones(1, 'u8'), 0))"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    fixed = {
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | fixed | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_warm_up_starts_no_thread() -> None:
    result = run(PROBE)
    assert result.returncode == 0, result.stderr


def test_compiled_kernels_are_kept_on_disk(tmp_path: Path) -> None:
    result = run(
        "from taskmanager.kernels import compiled_rows", NUMBA_CACHE_DIR=str(tmp_path / "cache")
    )
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "cache").rglob("*.nbi"))


def test_both_implementations_provide_every_kernel() -> None:
    loops = {name: loop for name, loop in vars(Kernels).items() if not name.startswith("_")}
    assert loops.keys() == set(twins.__all__)
    for name, loop in loops.items():
        twin = inspect.signature(getattr(twins, name))
        assert list(twin.parameters) == list(inspect.signature(loop).parameters), name


def test_one_of_those_that_share_a_directory_compiles_at_a_time(tmp_path: Path) -> None:
    shared = tmp_path / "cache"
    with ExitStack() as one:
        enter_alone(one, shared)
        with ExitStack() as other, pytest.warns(RuntimeWarning, match="locked by another process"):
            enter_alone(other, shared, wait_max_s=0.0)
    with ExitStack() as other, warnings.catch_warnings(action="error"):
        enter_alone(other, shared, wait_max_s=0.0)


@pytest.mark.skipif(not RUNS_ALL, reason="it compiles kernels: make test-all runs it")
def test_an_upgrade_in_place_finds_no_kernel_of_the_version_before(tmp_path: Path) -> None:
    """``weighted_sum`` is compiled with ``mix``, which lies in another file."""
    for package in ("taskmanager", "penstock", "common"):
        shutil.copytree(ROOT / package, tmp_path / package)
    place = {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    before = run(SUM, **place)
    words = tmp_path / "taskmanager/kernels/compiled_words.py"
    source = words.read_text()
    words.write_text(source.replace("np.uint64(30)", "np.uint64(29)"))
    assert words.read_text() != source
    changed = run(SUM, **place)
    words.write_text(source)
    back = run(SUM, **place)
    assert int(before.stdout) != int(changed.stdout), before.stderr + changed.stderr
    assert before.stdout == back.stdout


def test_the_version_covers_what_is_compiled_into_kernels() -> None:
    """Whatever a kernel's module takes from elsewhere, except for the types of annotations."""
    covered = {module.__name__ for module in kernel_cache.BESIDE}
    for path in Path(kernel_cache.__file__).parent.glob("compiled_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("penstock"):
                are_types = all(name.name.endswith("Array") for name in node.names)
                assert are_types or node.module in covered, f"{path.name}: {node.module}"


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
@pytest.mark.parametrize("left", [b"", b"\0" * 64], ids=["empty", "zeros"])
def test_a_damaged_kernel_is_compiled_anew(ending: str, left: bytes, tmp_path: Path) -> None:
    """As a power failure leaves it: numba renames its files into place and does not wait for the disk."""

    def twice(number: int) -> int:
        return 2 * number

    def compiled() -> Any:
        with kernel_cache.kept_in(tmp_path):
            return compiled_and_kept(twice, numba.int64(numba.int64))

    compiled()
    (file,) = tmp_path.rglob(f"*{ending}")
    file.write_bytes(left)
    with pytest.warns(RuntimeWarning, match=r"twice in .* is damaged"):
        assert compiled()(21) == 42
    with warnings.catch_warnings(action="error"):
        assert compiled().stats.cache_hits


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
def test_damage_within_a_kernel_is_found_before_it_is_loaded(ending: str, tmp_path: Path) -> None:
    """A lost page in the middle of machine code would end the process with SIGSEGV when it is called."""

    def thrice(number: int) -> int:
        return 3 * number

    def compiled() -> Any:
        with kernel_cache.kept_in(tmp_path):
            return compiled_and_kept(thrice, numba.int64(numba.int64))

    compiled()
    (file,) = tmp_path.rglob(f"*{ending}")
    kept = bytearray(file.read_bytes())
    # ".nbi": the name of the file with the code; ".nbc": the code, of which ELF's name stands at the beginning
    at = kept.index(b".1.nbc") if ending == ".nbi" else kept.index(b"\x7fELF") + 64
    kept[at : at + 4] = bytes(4)
    file.write_bytes(kept)
    with pytest.warns(RuntimeWarning, match=r"thrice in .* is damaged .*is not what was written"):
        assert compiled()(14) == 42
    with warnings.catch_warnings(action="error"):
        assert compiled().stats.cache_hits


def test_kernels_without_a_directory_are_compiled_in_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="set NUMBA_CACHE_DIR to a writable directory"):
        assert kernel_cache.kernel_directory.__wrapped__() is None


def test_versions_that_nobody_has_loaded_for_a_month_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, young, other = (tmp_path / name for name in ("version-1", "version-2", "loops"))
    for directory in (old, young, other):
        directory.mkdir()
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    used = kernel_cache.kernel_directory.__wrapped__()
    assert {path.name for path in tmp_path.iterdir()} == {"version-2", "loops", used.name}
