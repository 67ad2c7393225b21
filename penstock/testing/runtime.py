"""The seam between ``penstock.testing`` and the daemons: the parts of them that a test runs.

Nothing else of this library names what lies above it; pyproject.toml declares the two imports. They are
made when a test needs them: whoever imports ``penstock.testing`` has not loaded a daemon yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.client.own_modules import PLAIN_NAMES, set_apart
from penstock.config import Configuration
from penstock.pb import graph_pb2

if TYPE_CHECKING:
    from taskmanager.harness.harness_runner import HarnessRunner


def run_graph(
    graph: graph_pb2.JobGraph,
    *,
    inputs: Sequence[str],
    output: str,
    config: Configuration,
    now_ms: int,
    subtask_index: int,
    snapshots: Sequence[bytes],
) -> HarnessRunner:
    """Starts a job within this thread; see ``HarnessRunner``."""
    set_apart(loaded=PLAIN_NAMES)
    from jobmanager.checkpoint.restored_operators import restored_operators
    from taskmanager.harness.harness_runner import HarnessRunner

    return HarnessRunner(
        graph,
        inputs=inputs,
        output=output,
        config=config,
        now_ms=now_ms,
        subtask_index=subtask_index,
        snapshots=snapshots,
        assignment=restored_operators,
    )
