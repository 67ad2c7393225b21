"""Aim: functions of the user's modules are pickled by value, whoever else does so at the same time.

Method: many modules, and threads that take turns often; all get what one alone gets.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from penstock.functions.user_code import pickle_function


def test_several_threads_build_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(200):
        module = ModuleType(f"mine_{number}")
        module.__file__ = str(tmp_path / f"{module.__name__}.py")
        exec(f"def function(row):\n    return {number}", module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def pickled(number: int) -> bytes:
        function = sys.modules[f"mine_{number % 200}"].function
        return pickle_function(function, operator="map").pickled

    alone = [pickled(number) for number in range(20)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(pickled, range(20))) == alone
    finally:
        sys.setswitchinterval(before)
