"""Tests of functions and chains of operators without a cluster: ``import penstock.testing as pt``.

``pt.harness(...)`` runs the operators of a job as they run in a slot, in the calling thread and on a clock
that the test moves. Not imported by ``import penstock``: it loads the runtime.
"""

from penstock.testing.harness import Harness, harness

__all__ = ["Harness", "harness"]
