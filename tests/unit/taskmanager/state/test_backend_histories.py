"""Aim: whatever happens, both backends restore to what they held when a checkpoint was taken.

Method: a state machine runs the same random history on both at once, with real checkpoints, in which files
are deleted as soon as the registry lets go of them; the oracle is plain dicts. Stories of many small
checkpoints in a row (``CheckpointStory``) bring about what such a history seldom comes to: several
generations of files, removals between them, checkpoints that fail while others are on their way.
PENSTOCK_HISTORIES sets how many stories there are, and half as many histories.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from typing_extensions import override

from tests.support.backend_history import COLUMNS, GROUPS, KEY_KINDS, NAMESPACES, BackendHistory
from tests.support.checkpoint_story import CheckpointStory

HISTORIES = int(os.environ.get("PENSTOCK_HISTORIES") or 12)
SEEDS = st.integers(0, 1 << 16)
NAMES = st.sampled_from(GROUPS)
SPACES = st.sampled_from(NAMESPACES)


class Histories(RuleBasedStateMachine):
    """See ``BackendHistory``: each rule is one of its operations."""

    history: BackendHistory | None = None

    @initialize(
        keys=st.sampled_from(sorted(KEY_KINDS)),
        is_incremental=st.booleans(),
        retained_max=st.integers(1, 3),
        inline_max_bytes=st.sampled_from([0, 500, 1 << 20]),
        small_limits=st.booleans(),
        parallelism=st.integers(1, 2),
    )
    def begin(self, **options: Any) -> None:
        self.history = BackendHistory(**options)

    def at(self, seed: int) -> BackendHistory:
        assert self.history is not None
        self.history.random.seed(seed)
        return self.history

    @rule(
        seed=SEEDS,
        operations=st.lists(
            st.sampled_from(
                [
                    BackendHistory.bundle,
                    BackendHistory.set_timers,
                    BackendHistory.add_to_sessions,
                    BackendHistory.add_to_counts,
                    BackendHistory.fire_timers,
                    BackendHistory.fire_sessions,
                    BackendHistory.sweep,
                    BackendHistory.press,
                ]
            ),
            min_size=1,
            max_size=4,
        ),
    )
    def change(self, seed: int, operations: list[Callable[[BackendHistory], None]]) -> None:
        history = self.at(seed)
        for operation in operations:
            operation(history)

    @rule(seed=SEEDS, name=NAMES, namespaces=st.lists(SPACES, min_size=1, max_size=3))
    def add(self, seed: int, name: str, namespaces: list[int]) -> None:
        for namespace in namespaces:
            self.at(seed).add(name, namespace)
            self.at(seed).add_rows(namespace)

    @rule(name=NAMES, one=SPACES, other=SPACES)
    def merge(self, name: str, one: int, other: int) -> None:
        self.at(0).merge(name, one, other)

    @rule(name=NAMES, namespace=SPACES, is_emitted=st.booleans())
    def drop(self, name: str, namespace: int, is_emitted: bool) -> None:
        if is_emitted:
            self.at(0).emit(name, namespace)
        else:
            self.at(0).drop(name, namespace)
            self.at(0).drop_rows(namespace)

    @rule(seed=SEEDS, bundles=st.integers(0, 2))
    def checkpoint(self, seed: int, bundles: int) -> None:
        history = self.at(seed)
        history.job.checkpoint()
        for _ in range(bundles):
            history.bundle()
            history.set_timers()
            history.add(history.random.choice(GROUPS), history.random.choice(NAMESPACES))
            history.add_to_sessions()

    @rule(seed=SEEDS, steps=st.integers(1, 12))
    def export(self, seed: int, steps: int) -> None:
        for step in range(steps):
            self.at(seed + step).export_step()

    @rule(seed=SEEDS, count=st.integers(1, 4))
    def write(self, seed: int, count: int) -> None:
        for step in range(count):
            self.at(seed + step).finish_one()

    @rule(is_stored=st.booleans())
    def fail_checkpoint(self, is_stored: bool) -> None:
        if is_stored:
            self.at(0).job.abort_oldest()
        else:
            self.at(0).job.fails_to_store = True

    @rule()
    def delay_or_deliver_notices(self) -> None:
        job = self.at(0).job
        job.is_deaf = not job.is_deaf
        job.listen()

    @rule(
        parallelism=st.integers(1, 3),
        is_written=st.booleans(),
        is_older=st.booleans(),
        asked=st.sets(st.sampled_from([descriptor.name for descriptor in COLUMNS])),
        is_checked=st.booleans(),
    )
    def restart(
        self, parallelism: int, is_written: bool, is_older: bool, asked: set[str], is_checked: bool
    ) -> None:
        history = self.at(0)
        if is_written:
            history.job.complete()
        history.restart(parallelism, older=is_older, asked=sorted(asked))
        if is_checked:
            history.check()

    @rule(parallelism=st.integers(1, 3), is_checked=st.booleans())
    def cross(self, parallelism: int, is_checked: bool) -> None:
        history = self.at(0)
        history.cross(parallelism)
        if is_checked:
            history.check()

    @rule()
    def bury(self) -> None:
        self.at(0).job.bury()

    @override
    def teardown(self) -> None:
        if self.history is None:
            return
        try:
            history = self.at(0)
            history.job.is_deaf = history.job.fails_to_store = False
            history.job.listen()
            history.job.complete()
            history.restart(2)
            history.check()
            history.checkpoint()
            history.restart(3)
            history.check()
            history.drain_timers()
        finally:
            self.history.close()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=max(1, HISTORIES // 2),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_stories_of_many_small_checkpoints(seed: int) -> None:
    CheckpointStory(seed).run()
