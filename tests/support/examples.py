"""How many examples a property is tried with, and which seeds of a simulation."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

RUNS_ALL = os.environ.get("PENSTOCK_TESTS") == "all"
SHARE, FEWEST = 4, 10
DEFAULT = 100


def examples(count: int, **others: Any) -> settings:
    """Settings for ``count`` examples, of which CI takes a quarter, but ten at least; ``make test-all`` takes all."""
    return settings(max_examples=number_of(count), **others)


def number_of(count: int) -> int:
    """How many those are in this run."""
    return count if RUNS_ALL else min(count, max(FEWEST, count // SHARE))


def half_of(seeds: range) -> range:
    """The first half of the seeds of a simulation in CI; ``make test-all`` takes all."""
    return seeds if RUNS_ALL else seeds[: len(seeds) // 2]
