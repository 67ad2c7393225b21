"""The benchmark of spill files runs, and measures each format that slots write."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import spill


def test_both_formats_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["spill", "--mb", "1", "--batch-rows", "4096"])
    spill.main()
    found = json.loads(capsys.readouterr().out)
    for name in ("arrow", "parquet"):
        assert found[f"{name}_write_mb_per_s"] > 0
        assert found[f"{name}_read_mb_per_s"] > 0
