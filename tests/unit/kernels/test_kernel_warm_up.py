"""Aim: warm-up leaves a process that may fork, and every kernel ready. Method: child processes."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigurationError
from taskmanager.kernels import backend, compiled, twin, warm_up
from taskmanager.kernels.interface import Kernels

ROOT = Path(__file__).parents[3]

PROBE = """
import os, sys
import taskmanager.kernels as kernels
assert "numba" not in sys.modules, "importing the package must not import the compiler"
kernels.warm_up()
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
print("numba" in sys.modules)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != backend.VARIABLE}
    clean |= {
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(("choice", "imported"), [("", "True"), ("numpy", "False")])
def test_warm_up_starts_no_thread(choice: str, imported: str) -> None:
    result = run(PROBE, PENSTOCK_KERNELS=choice)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == imported


def test_compiled_kernels_are_kept_on_disk(tmp_path: Path) -> None:
    result = run(
        "from taskmanager.kernels import compiled_rows", NUMBA_CACHE_DIR=str(tmp_path / "cache")
    )
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "cache").rglob("*.nbi"))


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "fortran")
    backend.kernels.cache_clear()
    with pytest.raises(ConfigurationError, match="'fortran': it must be"):
        warm_up()
    monkeypatch.undo()
    backend.kernels.cache_clear()
    warm_up()


def test_both_implementations_provide_every_kernel() -> None:
    wanted = {name for name, _ in inspect.getmembers(Kernels, inspect.isfunction)} - {"__init__"}
    wanted = {name for name in wanted if not name.startswith("_")}
    assert wanted == set(compiled.__all__) == set(twin.__all__) - {"NUMPY_KEY_LOOPS"}
