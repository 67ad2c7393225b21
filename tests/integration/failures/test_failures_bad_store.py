"""Store, daemons and a user's job go through bad times together, in real processes.

Aim: whatever the checkpoint store does (fails, hangs, lies about outcomes, comes back) while daemons are killed, the
output is exact, whoever asked for a checkpoint is answered, nothing hangs, and the store is left in order.
Method: ``tests.support.chain``; ``make chain`` goes on for two minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chain import go_through
from tests.support.examples import RUNS_ALL

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.skipif(not RUNS_ALL, reason="it takes long: make test-all runs it")
def test_a_job_outlives_a_store_that_is_bad(tmp_path: Path) -> None:
    brought = go_through(tmp_path, seed=9, seconds=6, with_successor=False)
    assert brought.kills == 2
    assert brought.calls["lost"] + brought.calls["denied"]
    assert brought.calls["hung"]
    assert brought.calls["failed"]
