"""Stories of many checkpoints in a row, in which little changes between two of them.

Of a large state small parts change: only then do snapshots consist of several generations, with removals
that older generations still hold. Each story changes only a few kinds of state, so that many tables and
files stay as they are while others come and go. Checkpoints are confirmed, aborted early or late, fail,
or stay on their way while others are taken; subtasks crash in between and are restored, by as many or by
another number of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from tests.support.backend_history import COLUMNS, GROUPS, KEY_KINDS, NAMESPACES, BackendHistory
from tests.support.backend_job import BACKENDS

_STATES: Final[dict[str, tuple[str, ...]]] = {
    "groups": ("add", "add", "add", "drop", "merge"),
    "emission": ("add", "emit", "emit", "emit"),
    "rows": ("add_rows", "add_rows", "drop_rows"),
    "sessions": ("add_to_sessions", "add_to_sessions", "fire_sessions"),
    "counts": ("add_to_counts",),
    "timers": ("set_timers", "set_timers", "fire_timers"),
    "objects": ("bundle", "bundle", "bundle", "sweep"),
}
_POPULATING: Final = ("add", "add_rows", "add_to_sessions", "add_to_counts", "set_timers", "bundle")
_POPULATING_ROUNDS: Final = 4
_GENERATIONS: Final = (5, 12)
_ALL_KEYS: Final = 60


class CheckpointStory:
    """One story.

    Args:
        seed: of everything in it.
    """

    def __init__(self, seed: int) -> None:
        choose = self._random = random.Random(seed)
        self._parallelism = choose.choice([1, 1, 2, 3])
        self.history = BackendHistory(
            seed=seed,
            keys=choose.choice(sorted(KEY_KINDS)),
            is_incremental=choose.random() < 0.9,
            retained_max=choose.choice([1, 1, 1, 2, 3]),
            inline_max_bytes=choose.choice([0, 0, 0, 500]),
            small_limits=choose.random() < 0.4,
            parallelism=self._parallelism,
        )
        self._job = self.history.job
        chosen = choose.sample(sorted(_STATES), choose.choice([1, 1, 2, 3]))
        self._changes = [name for state in chosen for name in _STATES[state]]
        self._names = choose.sample(GROUPS, choose.choice([1, 2, 5]))
        self._restart_share = choose.choice([0.05, 0.2, 0.4])
        self._late_share = choose.choice([0.1, 0.5])

    def run(self) -> None:
        """From an empty state to a last restore; everything is closed then."""
        history = self.history
        try:
            self._populate()
            history.keys_max = self._random.choice([1, 2, 4])
            if self._random.random() < 0.7:
                # So what has changed changes again while it is being written.
                history.hot_keys = self._random.sample(history.keys.keys, 5)
            for _ in range(self._random.randint(*_GENERATIONS)):
                self._change()
                self._checkpoint()
                if self._random.random() < self._restart_share:
                    self._restart()
            self._settle()
            history.check()
            self._lose_one()
            history.checkpoint()
            history.check_nothing_is_left()
            history.restart(self._random.randint(1, 3))
            history.check()
            for _ in BACKENDS:
                history.cross(self._random.randint(1, 3))
                history.check()
            history.drain_timers()
        finally:
            history.close()

    def _populate(self) -> None:
        """A large state, in a confirmed checkpoint or in several."""
        self.history.keys_max = _ALL_KEYS
        for _ in range(_POPULATING_ROUNDS):
            for name in _POPULATING:
                if name in self._changes:
                    self._do(name)
            if self._random.random() < 0.5:
                self.history.checkpoint()
        self.history.checkpoint()

    def _change(self) -> None:
        for _ in range(self._random.randint(0, 3)):
            self._do(self._random.choice(self._changes))
        if self._random.random() < 0.1:
            self.history.press()

    def _do(self, name: str) -> None:
        choose, history = self._random, self.history
        group, namespace = choose.choice(self._names), choose.choice(NAMESPACES)
        match name:
            case "add" | "emit" | "drop":
                getattr(history, name)(group, namespace)
            case "add_rows" | "drop_rows":
                getattr(history, name)(namespace)
            case "merge":
                history.merge(group, namespace, choose.choice(NAMESPACES))
            case _:
                getattr(history, name)()

    def _checkpoint(self) -> None:
        """Takes one, and something comes of it, now or while later ones are taken."""
        choose, history, job = self._random, self.history, self._job
        if len(job.writings) > 4 * self._parallelism:
            self._settle()
        job.checkpoint()
        if choose.random() < self._late_share:
            for _ in range(choose.randint(0, 4)):
                history.export_step()
            return
        endings: list[tuple[int, Callable[[], None]]] = [
            (8, job.complete),
            (2, self._abort_late),
            (1, job.abort_oldest),
            (1, self._fail_to_store),
            (1, self._fail_to_write),
            (2, history.interrupt_write),
            (2, self._finish_some),
            (1, self._delay_or_deliver_notices),
            (4, self._change_while_it_is_written),
        ]
        choose.choices([end for _, end in endings], [weight for weight, _ in endings])[0]()

    def _change_while_it_is_written(self) -> None:
        for _ in range(self._random.randint(1, 3)):
            for _ in range(self._random.randint(0, 2)):
                self.history.export_step()
            self._change()
        self._job.complete()
        if self._random.random() < 0.4:
            self._restart()

    def _finish_some(self) -> None:
        for _ in range(self._random.randint(1, 3)):
            self.history.finish_one()

    def _abort_late(self) -> None:
        """Some subtasks have written and acknowledged it."""
        self._finish_some()
        self._job.abort_oldest()

    def _fail_to_store(self) -> None:
        self._job.fails_to_store = True
        self._job.complete()

    def _fail_to_write(self) -> None:
        self._job.fails_to_write = True
        self.history.finish_one()

    def _lose_one(self) -> None:
        """A checkpoint for which everything goes wrong that can."""
        choose, history = self._random, self.history
        history.drop(choose.choice(self._names), choose.choice(NAMESPACES))
        self._do(choose.choice(self._changes))
        history.add("sums", choose.choice(NAMESPACES))
        self._job.checkpoint()
        for _ in range(self._parallelism):
            history.interrupt_write()
            self._fail_to_write()
        self._settle()

    def _delay_or_deliver_notices(self) -> None:
        self._job.is_deaf = not self._job.is_deaf
        self._job.listen()
        self._job.complete()

    def _settle(self) -> None:
        """Nothing goes wrong any more, and what is on its way arrives."""
        self._job.is_deaf = self._job.fails_to_store = self._job.fails_to_write = False
        self._job.listen()
        self._job.complete()

    def _restart(self) -> None:
        choose, history = self._random, self.history
        if choose.random() < 0.6:
            self._job.complete()
        if choose.random() < 0.4:
            self._parallelism = choose.randint(1, 3)
        self._job.is_incremental = choose.random() < 0.9
        names = [descriptor.name for descriptor in COLUMNS]
        asked = None if choose.random() < 0.6 else [n for n in names if choose.random() < 0.5]
        history.restart(self._parallelism, older=choose.random() < 0.2, asked=asked)
        if choose.random() < 0.5:
            history.check()
        if choose.random() < 0.3:
            self._job.bury()
