"""JobManagers that follow each other, and jobs that claim one savepoint, or what an ended job has left, where any call may be interrupted by what others do.

The stores, the claims and their return are the real ones (``job_store.py``, ``job_start_runner.py``,
``claimed_start_store.py``); what ``claimed_starts_runner.py`` makes of them is told here in one thread. Calls fail, lose
their answers, or are their process' last ones; swaps are made long after their caller was told that nothing is known.

Invariants: a job that is accepted or gone on with has its claims, and no other one that has not ended does; in the end what
is claimed is that job's, an ended one's, or nobody's.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from typing_extensions import override

from common.pb import job_record_pb2
from jobmanager.dispatcher import claimed_start_store
from jobmanager.dispatcher.claimed_start_store import withdraw
from jobmanager.dispatcher.job_start_runner import JobStart
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.leader_store import LeaderStore
from penstock.errors import Fenced, JobRejected, StoreTransient, StreamError
from penstock.graph import output_in_doubt
from penstock.graph.output_in_doubt import decide_output
from penstock.graph.restore_check import RestoreCheck
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.head import HeadStore
from penstock.storage.manifest import encode_manifest
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import SwapUnanswered
from penstock.storage.output_claim import OutputClaim, OutputUse, read_claim
from penstock.storage.prepared_output import COMMITTABLES
from penstock.storage.restore_point import open_restore_point
from penstock.storage.savepoint import MANIFEST_PATH
from tests.support.simulated_store import AuditedStore, StoreAccess, StoreWeather

JOBS = [number * 32 for number in "123"]
ORIGINAL = "0" * 32
SAVEPOINT, CHECKPOINT = "kept/savepoint", "kept/job/chk-7"
BAD = StoreWeather(failures=0.01, lost_answers=0.01, late_swaps=0.15)
_CALM, _LEADER = StoreWeather(), StoreWeather(failures=0.01)
_INTERRUPTED, _KILLED, _ARRIVING, _ARE_LATE = 0.1, 0.004, 0.1, 0.7
_DEPTH_MAX = 2
_STEPS = 60


class _Killed(BaseException):
    """A JobManager ends in the midst of a call."""


class _Objects(AuditedStore):
    @override
    def arrive(self, draws: random.Random) -> None:
        if self.on_their_way and draws.random() < _ARRIVING:
            self.come(draws)

    def come(self, draws: random.Random) -> None:
        """One of those that are on their way comes, or never does."""
        swap = self.on_their_way.pop(draws.randrange(len(self.on_their_way)))
        self.late_swaps += draws.random() < _ARE_LATE and swap()


class _Access(StoreAccess):
    def __init__(self, world: SimulatedClaims, objects: _Objects, weather: StoreWeather) -> None:
        draws = world.draws
        super().__init__(objects, draws, lambda: _CALM if world.is_calm else weather)
        self._world = world

    @override
    def _enter(self, call: str) -> None:
        self._world.interrupt()
        super()._enter(call)


class SimulatedClaims:
    """All of it.

    Args:
        seed: draws.
    """

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.is_calm = False
        self.counts: Counter[str] = Counter()
        self.kept, self.records, self.saved = _Objects(), _Objects(), _Objects()
        if is_savepoint := seed % 3 > 0:
            self.saved.objects.put(MANIFEST_PATH, [encode_manifest(_manifest())])
        else:
            _leave_checkpoint(self.saved.objects)
        self.uri = SAVEPOINT if is_savepoint else CHECKPOINT
        self.use = OutputUse.COMMITS if is_savepoint else None
        self.ended = {ORIGINAL}
        self._depth = 0
        self.leaders = [Leader(self) for _ in range(2)]

    def run(self) -> None:
        """So many steps with faults; what is on its way then comes, or does not, and the last leader gives all back."""
        for _ in range(_STEPS):
            self._turn()
        self.is_calm = True
        for _ in range(3):
            for objects in (self.records, self.saved):
                while objects.on_their_way:
                    objects.come(self.draws)
            last = Leader(self)
            last.begin()
            last.give_back_all()
            self.check(last)
            self.counts["late"] += self.records.late_swaps + self.saved.late_swaps

    def check(self, leader: Leader) -> None:
        """Nothing is under way."""
        owner, use = self.claimants()
        for job_id in {owner, use.job_id if use else ""} - {""}:
            assert job_id in leader.running | self.ended, (
                f"{job_id[:2]} has claims, and never began"
            )
        for job_id in leader.running:
            self.check_has(job_id)

    def check_has(self, job_id: str) -> None:
        """A job is run: all that it has claimed is its own."""
        wanted = job_id, OutputClaim(self.use, job_id) if self.use else None
        assert self.claimants() == wanted, f"{job_id[:2]} runs, but claims are {self.claimants()}"

    def claimants(self) -> tuple[str, OutputClaim | None]:
        """Whose the savepoint is, and who publishes its output."""
        point = open_restore_point(self.uri, lambda _: self.saved.objects)
        return point.owner, read_claim(self.saved.objects)

    def interrupt(self) -> None:
        """What comes between a caller and the storage."""
        if self.is_calm or not self._depth:
            return
        if self.draws.random() < _KILLED:
            raise _Killed
        if self._depth <= _DEPTH_MAX and self.draws.random() < _INTERRUPTED:
            self._turn()

    def _turn(self) -> None:
        free = [one for one in self.leaders if not one.is_busy]
        if not free:
            return
        self._depth += 1
        try:
            self.draws.choice(free).turn()
        finally:
            self._depth -= 1


class Leader:
    """One JobManager, over all its lives."""

    def __init__(self, world: SimulatedClaims) -> None:
        self._world = world
        self.is_busy = False
        self.running = set[str]()
        self._left = set[str]()
        self._is_leading = False

    def turn(self) -> None:
        """Its next step."""
        world, self.is_busy = self._world, True
        try:
            if not self._is_leading or world.draws.random() < 0.05:
                self._is_leading = False
                self.begin()
            elif self._left and world.draws.random() < 0.5:
                self.give_back_all()
            elif self.running and world.draws.random() < 0.3:
                self._end(world.draws.choice(sorted(self.running)))
            else:
                self._submit(world.draws.choice(JOBS))
        except (_Killed, Fenced) as error:
            world.counts[type(error).__name__] += 1
            self._is_leading = False
        except StreamError as error:
            world.counts[type(error).__name__] += 1
        finally:
            self.is_busy = False

    def begin(self) -> None:
        """A new process."""
        world = self._world
        leader = LeaderStore(_Access(world, world.kept, _LEADER), "kept")
        leader.take_over()
        self._jobs = JobStore(_Access(world, world.records, BAD), "jobs", leader)
        self._saved = _Access(world, world.saved, BAD)
        stored = self._jobs.stored()
        if problems := [one.problem for one in stored if one.problem]:
            assert not world.is_calm, problems
            raise StoreTransient(problems[0])
        world.ended |= {one.job_id for one in stored if one.has_ended}
        self.running = {one.job_id for one in stored if not one.has_ended}
        self._left = set(self._jobs.unstored())
        self._is_leading = True
        if world.is_calm:
            return
        for job_id in self.running:
            world.counts["gone on with"] += 1
            world.check_has(job_id)

    def _end(self, job_id: str) -> None:
        self._jobs.note_end(job_id, job_record_pb2.StoredEnd(state="FINISHED"), b"")
        self.running.discard(job_id)
        self._world.ended.add(job_id)

    def _submit(self, job_id: str) -> None:
        world = self._world
        if job_id in self.running | world.ended:
            return
        self._give_back(job_id)
        point = open_restore_point(world.uri, lambda _: self._saved)
        if point.owner not in {"", job_id, *world.ended}:
            raise JobRejected("it is claimed")
        output = decide_output(point, "commit", job_id, world.ended.__contains__)
        if output.refusal:
            raise JobRejected(output.refusal)
        graph = graph_pb2.JobGraph(name="job")
        start = JobStart(job_id, graph, point, True, RestoreCheck((), ()), output)
        try:
            start.claim(self._jobs.starts.note)
            has_ended = world.ended.__contains__
            start.claim_output(self._jobs.starts.note, self._jobs.check_leads, has_ended)
        except StreamError as error:
            self._give_back_or_later(job_id, may_come=isinstance(error, SwapUnanswered))
            raise
        try:
            self._jobs.save(job_id, graph, 0)
        except (Fenced, SwapUnanswered):
            self._left.add(job_id)
            raise
        except StreamError:
            self._give_back_or_later(job_id, may_come=True)
            raise
        self.running.add(job_id)
        world.counts["accepted"] += 1
        world.check_has(job_id)

    def give_back_all(self) -> None:
        """What is left from before."""
        for job_id in sorted(self._left - self.running):
            self._give_back(job_id)
            self._left.discard(job_id)

    def _give_back_or_later(self, job_id: str, *, may_come: bool) -> None:
        try:
            self._give_back(job_id, may_come=may_come)
        except StreamError:
            self._left.add(job_id)

    def _give_back(self, job_id: str, *, may_come: bool = True) -> None:
        start = self._jobs.starts.read(job_id)
        with _opened(lambda _: self._saved):
            withdraw(self._jobs, job_id, start, may_come=may_come)
        if start is not None:
            self._jobs.starts.remove(job_id)
            self._world.counts["given back"] += 1


@contextmanager
def _opened(opened: Callable[[str], StoreAccess]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (claimed_start_store, output_in_doubt):
            patch.setattr(module, "open_store", opened)
        patch.setattr(claimed_start_store, "restorable_from", lambda *_: "")
        yield


def _leave_checkpoint(store: MemoryStore) -> None:
    manifest = checkpoint_pb2.CheckpointManifest(job_id=ORIGINAL, checkpoint_id=7)
    store.put("chk-7/manifest-1", [encode_manifest(manifest)])
    heads = HeadStore(store)
    head = heads.claim(ORIGINAL, 1)
    head.retained.add(checkpoint_id=7, manifest_path="chk-7/manifest-1")
    heads.swap(head)


def _manifest() -> checkpoint_pb2.CheckpointManifest:
    manifest = checkpoint_pb2.CheckpointManifest(job_id=ORIGINAL, checkpoint_id=7)
    manifest.properties.kind = checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
    sink = manifest.vertices.add(id="v1", parallelism=1, max_parallelism=128)
    sink.operators.add(uid="snk", kind="sink")
    held = manifest.subtasks.add(vertex="v1").operators.add(operator_uid="snk").lists.add()
    held.name, held.items[:] = COMMITTABLES, [b"a file"]
    return manifest


def claimed(seed: int) -> SimulatedClaims:
    """The run of a seed; fails where an invariant does not hold."""
    claims = SimulatedClaims(seed)
    try:
        claims.run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return claims


def main(first: int, count: int) -> None:
    """Runs so many seeds."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        counts += claimed(seed).counts
    print(f"{count} seeds from {first}: {dict(counts)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
