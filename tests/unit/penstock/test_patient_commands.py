"""Aim: a command whose directory hangs says what it waits for, and Ctrl-C ends it. Method: child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.context import EXIT_INTERRUPTED, patiently
from tests.support.examples import RUNS_ALL

HANGING = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from penstock.cli import context
from penstock.cli.main import main
from penstock.storage import fsck, kept_state

context._PATIENCE_S = 0.05
threads = ThreadPoolExecutor(1)
never = threading.Event()
fsck.check_store = kept_state.dispose = lambda *_, **__: threads.submit(never.wait).result()
main()
"""


@pytest.mark.skipif(not RUNS_ALL, reason="it starts processes: make test-all runs it")
@pytest.mark.parametrize("command", [["fsck"], ["dispose", "--force"]], ids=["fsck", "dispose"])
def test_a_directory_that_hangs_is_named_and_can_be_given_up(
    command: list[str], tmp_path: Path
) -> None:
    """The thread that hangs is one of those that an interpreter waits for when it ends."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", HANGING, *command, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    ) as process:
        assert process.stderr is not None
        try:
            assert f"still waiting for {tmp_path}; Ctrl-C gives up" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert "gave up on" in process.stderr.read()
            assert process.wait(60) == EXIT_INTERRUPTED
        finally:
            process.kill()


def test_what_does_not_hang_is_done_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert patiently("/srv/kept", lambda: 5) == 5
    with pytest.raises(FileNotFoundError):
        patiently("/srv/kept", Path("/nowhere/kept").read_bytes)
    assert capsys.readouterr().err == ""
