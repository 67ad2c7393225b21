"""Aim: warm-up leaves a process that may fork, and every kernel ready. Method: child processes."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest

from taskmanager.kernels.backend import enter_alone
from taskmanager.kernels.compiled import Kernels
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


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    fixed = {
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-c", code],
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
