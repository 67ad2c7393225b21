"""Candidates, ZooKeeper and storage in one thread, where any call may be interrupted by what the others do.

The cores and the stores are the real ones (``election.py``, ``leader_store.py``, ``job_store.py``); replaced are ZooKeeper,
by a list of nodes and sessions, and the storage's disk. Every call of the storage may come after steps of others, fail
before it did anything, or lose its answer; swaps may be made long after their caller was told that nothing is known. What leads does the one thing that must not be done twice: it reserves
blocks of attempt numbers, and uses them. One generator of random numbers draws all of it.

Invariants, looked at from outside, at each swap that the storage accepts: epochs in LEADER grow, none twice; nothing of
an older leader follows in the job's record once a newer one has written it. And no attempt number is used twice.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from typing_extensions import override

from jobmanager.leadership.election import (
    Connected,
    Elected,
    ElectionEvent,
    LeaderNode,
    LeaderTold,
    SessionLost,
    Suspended,
    before,
    decode_leader,
    encode_leader,
    reason_to_end,
)
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.leader_store import LEADER_PATH, LeaderStore
from jobmanager.stores.record_store import RECORD_NAME
from jobmanager.stores.stored_job import decode_record
from penstock.errors import Fenced, StoreTransient
from penstock.pb import graph_pb2
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import SwapUnanswered
from penstock.storage.swapped_object import NewerLeader

JOB_ID = "0123456789abcdef0123456789abcdef"
BLOCK = 10
_INTERRUPTED, _FAILED, _LOST = 0.3, 0.05, 0.05
_ARRIVING, _LOST_ON_THEIR_WAY = 0.1, 0.3
_DEPTH_MAX = 3
_STEPS = 400


class LedNoMore(BaseException):
    """A JobManager ends."""


class SimulatedElection:
    """All of it.

    Args:
        seed: draws.
        candidates: how many JobManagers.
        late_swaps: share of the swaps that nobody answers, and that are made later, or never.
    """

    def __init__(self, seed: int, candidates: int, late_swaps: float = 0.0) -> None:
        self._late_swaps = late_swaps
        self._on_their_way: list[Callable[[], None]] = []
        self.draws = random.Random(seed)
        self.is_calm = False
        self.counts: Counter[str] = Counter()
        self.used: set[int] = set()
        self.zookeeper = Zookeeper(self)
        self._objects = MemoryStore(1 << 24)
        self._depth = 0
        self._epochs: list[int] = []
        self._record_epoch = 0
        self.candidates = [Candidate(self, f"host-{number}:1") for number in range(candidates)]

    def run(self, steps: int) -> None:
        """So many steps with faults, then none until one leads and has used a block."""
        for _ in range(steps):
            self.turn()
        self.is_calm = True
        for candidate in self.candidates:
            candidate.is_paused = False
        used = len(self.used)
        for _ in range(2_000):
            self.turn()
            if len(self.used) > used and sum(one.is_leading for one in self.candidates) == 1:
                return
        raise AssertionError("nothing fails any more, and nobody leads, or two do")

    def turn(self) -> None:
        """One step of somebody."""
        if not self.is_calm and self.draws.random() < 0.12:
            self._fail()
        if self._on_their_way and self.draws.random() < _ARRIVING:
            self._arrive()
        ready = [one for one in self.candidates if not one.is_paused and not one.is_busy]
        if ready:
            self.draws.choice(ready).turn()

    def _fail(self) -> None:
        candidate = self.draws.choice(self.candidates)
        kind = self.draws.choice(
            ("killed", "paused", "resumed", "resumed", "expired", "suspended", "removed", "emptied")
        )
        if candidate.is_busy and kind == "killed":
            return  # in the middle of a call: as good as a lost answer, and then killed
        self.counts[kind] += 1
        match kind:
            case "killed":
                candidate.begin()
            case "paused" | "resumed":
                candidate.is_paused = kind == "paused"
            case "expired":
                self.zookeeper.expire(candidate.node)
            case "suspended":
                candidate.heard += [Suspended(), Connected()]
            case "removed":
                # By a standby that takes it for dead, and is wrong.
                self.zookeeper.delete(self.draws.choice([*self.zookeeper.nodes, ""]))
            case _:
                self.zookeeper.empty()

    # ------------------------------------------------------------ the storage

    def is_late(self, swap: Callable[[], None]) -> bool:
        """Whether a swap is on its way for long, and its caller hears nothing of it."""
        if self.is_calm or not self._late_swaps or self.draws.random() >= self._late_swaps:
            return False
        self.counts["unanswered"] += 1
        self._on_their_way.append(swap)
        return True

    def _arrive(self) -> None:
        swap = self._on_their_way.pop(self.draws.randrange(len(self._on_their_way)))
        if self.draws.random() < _LOST_ON_THEIR_WAY:
            return
        swap()

    def store_call(self, do: Callable[[], object], path: str) -> None:
        """What comes between a caller and the storage."""
        while self._depth < _DEPTH_MAX and self.draws.random() < _INTERRUPTED:
            self._depth += 1
            try:
                self.turn()
            finally:
                self._depth -= 1
        if not self.is_calm and self.draws.random() < _FAILED:
            self.counts["failed"] += 1
            raise StoreTransient(f"{path}: no answer")
        do()
        if not self.is_calm and self.draws.random() < _LOST:
            self.counts["lost"] += 1
            raise StoreTransient(f"{path}: the answer is lost")

    def swapped(self, path: str, new: bytes) -> None:
        """The storage has accepted it."""
        if path == LEADER_PATH:
            probe = LeaderStore(self._objects, "probe")
            epoch = probe._decode(new).epoch
            assert not self._epochs or epoch > self._epochs[-1], f"{epoch} after {self._epochs}"
            self._epochs.append(epoch)
        elif path.endswith(RECORD_NAME):
            epoch = decode_record(new, path).leader_epoch
            assert epoch >= self._record_epoch, f"{epoch} writes after {self._record_epoch}"
            self._record_epoch = epoch

    def use(self, block: range) -> None:
        """A leader deploys attempts with these numbers."""
        twice = self.used.intersection(block)
        assert not twice, f"used twice: {sorted(twice)}"
        self.used.update(block)

    def open_store(self) -> MemoryStore:
        """The storage as one JobManager calls it."""
        return _Calls(self, self._objects)


class _Calls(MemoryStore):
    def __init__(self, world: SimulatedElection, objects: MemoryStore) -> None:
        super().__init__(1)
        self._world = world
        self._shared = objects

    @override
    def put(self, path, chunks):  # type: ignore[no-untyped-def]
        return self._shared.put(path, chunks)

    @override
    def get(self, path: str) -> bytes:
        found: list[bytes] = []
        self._world.store_call(lambda: found.append(self._shared.get(path)), path)
        return found[0]

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        outcome: list[bool] = []

        def swap() -> None:
            outcome.append(self._shared.compare_and_swap(path, expected, new))
            if outcome[0]:
                self._world.swapped(path, new)

        def send() -> None:
            if self._world.is_late(late):
                raise SwapUnanswered(f"{path}: no answer yet")
            swap()

        def late() -> None:
            swap()
            self._world.counts["late"] += outcome[0]

        self._world.store_call(send, path)
        return outcome[0]


@dataclass
class Zookeeper:
    """Nodes of the election, and what the leader has said."""

    world: SimulatedElection
    nodes: list[str] = field(default_factory=list)
    leader: bytes = b""
    _number: int = 0

    def join(self) -> str:
        """Makes a node."""
        self._number += 1
        self.nodes.append(f"{self.world.draws.getrandbits(64):x}-{self._number:010d}")
        return self.nodes[-1]

    def delete(self, node: str) -> None:
        """Takes a node away; its session lives on."""
        if node in self.nodes:
            self.nodes.remove(node)

    def expire(self, node: str) -> None:
        """Ends a session; its owner hears of it when it gets to it."""
        self.delete(node)
        for candidate in self.world.candidates:
            if candidate.node == node:
                candidate.heard.append(SessionLost())

    def empty(self) -> None:
        """Everything is forgotten."""
        self.nodes.clear()
        self.leader = b""
        self.tell()

    def say(self, leader: LeaderNode) -> None:
        """A leader says who it is."""
        self.leader = encode_leader(leader)
        self.tell()

    def tell(self) -> None:
        """All hear who leads."""
        for candidate in self.world.candidates:
            candidate.heard.append(LeaderTold(decode_leader(self.leader)))


class Candidate:
    """One JobManager, over all its lives."""

    def __init__(self, world: SimulatedElection, address: str) -> None:
        self._world = world
        self._address = address
        self.is_paused = False
        self.is_busy = False
        self.begin()

    def begin(self) -> None:
        """A new process: nothing of the former one lives on."""
        old = getattr(self, "node", "")
        if old and self._world.draws.random() < 0.5:
            self._world.zookeeper.delete(old)  # else its session lives on for a while
        self.node = self._world.zookeeper.join()
        self.heard: list[ElectionEvent] = [LeaderTold(decode_leader(self._world.zookeeper.leader))]
        self.is_leading = False
        self._is_elected = False
        self._told: LeaderNode | None = None
        self._jobs: JobStore | None = None
        self._attempts_end: int | None = None
        self._store = LeaderStore(self._world.open_store(), "kept")
        self._store.when_deposed = self._deposed

    def _deposed(self, error: NewerLeader) -> None:
        raise LedNoMore(str(error))

    def turn(self) -> None:
        """Its next step."""
        self.is_busy = True
        try:
            self._step()
        except StoreTransient:
            self._world.counts["retried"] += 1
        except (LedNoMore, Fenced):
            self._world.counts["deposed" if self.is_leading else "ended"] += 1
            self.begin()
        finally:
            self.is_busy = False

    def _step(self) -> None:
        # What has come may be heard late: the way from ZooKeeper has no time.
        if self.heard and (self._world.is_calm or self._world.draws.random() < 0.4):
            self._hear(self.heard.pop(0))
        elif self.is_leading:
            self._lead()
        elif self._is_elected:
            self._store.take_over(self._told.epoch if self._told else 0)
            self.is_leading = True
            self._jobs = JobStore(self._world.open_store(), "kept", self._store)
            self._world.counts["led"] += 1
            self._world.zookeeper.say(LeaderNode(self._address, self._store.epoch, self.node))
        else:
            self._contend()

    def _hear(self, event: ElectionEvent) -> None:
        if reason_to_end(event, is_leading=self.is_leading, tolerates_suspension=True):
            raise LedNoMore(repr(event))
        match event:
            case Elected():
                self._is_elected = True
            case LeaderTold(leader):
                self._told = leader
            case _:
                pass

    def _contend(self) -> None:
        rival = before(self.node, self._world.zookeeper.nodes)
        if rival is None:
            raise LedNoMore("its node is gone")
        if not rival:
            self._hear(Elected())
        elif rival not in [one.node for one in self._world.candidates]:
            # The session of a former life, which ends some time.
            self._world.zookeeper.expire(rival)

    def _lead(self) -> None:
        assert self._jobs is not None
        if self._world.draws.random() < 0.3:
            self._store.verify()
            return
        if self._attempts_end is None:
            stored = self._jobs.read(JOB_ID)
            if stored is None:
                graph = graph_pb2.JobGraph(name="job")
                self._attempts_end = self._jobs.save(JOB_ID, graph, 1)
                return
            if stored.problem:
                raise LedNoMore(stored.problem)
            self._attempts_end = stored.record.attempts_end
        first, end = self._attempts_end, self._attempts_end + BLOCK
        self._jobs.reserve_attempts(JOB_ID, end)
        self._attempts_end = end
        self._world.use(range(first, end))


def elected(seed: int, late_swaps: float = 0.0) -> SimulatedElection:
    """The run of a seed, between two and ten candidates; fails where an invariant does not hold."""
    election = SimulatedElection(seed, 2 + seed % 9, late_swaps)
    try:
        election.run(_STEPS)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return election


def main(first: int, count: int, late_swaps: float = 0.0) -> None:
    """Runs so many seeds."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        counts += elected(seed, late_swaps).counts
    print(f"{count} seeds from {first}: {dict(counts)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
