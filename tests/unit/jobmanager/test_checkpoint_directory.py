"""A directory for checkpoints that cannot be had is refused when the job is submitted, not found out later."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobmanager.job.job_description import check_checkpoint_directory
from penstock.errors import JobRejected


def job(directory: Path | str) -> Any:
    graph = SimpleNamespace(name="totals")
    return cast("Any", SimpleNamespace(checkpoint_directory=str(directory), graph=graph))


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobRejected, match=r"'totals'.*file/x.*Not a directory.*checkpointing\.dir"):
        check_checkpoint_directory(job(tmp_path / "file" / "x"))


def test_a_directory_is_made(tmp_path: Path) -> None:
    check_checkpoint_directory(job(tmp_path / "checkpoints" / "job"))
    assert (tmp_path / "checkpoints" / "job").is_dir()
    check_checkpoint_directory(job(""))
