"""What a simulation sees of the real machines and shells, and what it puts in the place of the machine's own things."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

from jobmanager import assembly_runner as jobmanager_assembly
from jobmanager.checkpoint import (
    checkpoint_starts_runner,
    claimed_head_store,
    store_calls_runner,
)
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.savepoint_store_runner import SavepointStoreRunner
from jobmanager.dispatcher import job_start_runner
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.graph.execution_attempt import AttemptState
from jobmanager.job import ended_checkpoints_runner
from jobmanager.job.job_description import JobDescription
from jobmanager.job.job_master import JobMaster
from jobmanager.job.job_master_runner import JobMasterRunner
from jobmanager.job.job_record import JobRecord
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import ENDING, JobState
from jobmanager.stores.directory_lock import DirectoryLock
from penstock.storage.restore_point import RestorePoint, open_restore_point
from taskmanager import assembly_runner
from taskmanager import main as taskmanager_main
from taskmanager.processes.slot_channel import SlotChannel
from taskmanager.rpc.registration_runner import RegistrationRunner
from taskmanager.slots.requirements import installed_packages
from tests.support.in_memory_network import SimulatedLoop
from tests.support.simulated_event_loop import OF_THREAD
from tests.support.simulated_failovers import FailoverAudit
from tests.support.simulated_forkserver import open_channel
from tests.support.simulated_groups import GroupAudit, group_point
from tests.support.simulated_rpc import SimulatedRpc, SimulatedServer, running_loop
from tests.support.simulated_store import AuditedStore

_installed_packages = functools.cache(installed_packages)


class SimulatedThread:
    """In place of a thread of a daemon's own."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self._target = target

    def start(self) -> None:
        """See ``threading.Thread``."""
        loop = running_loop()

        def work() -> None:
            OF_THREAD.loop = loop
            self._target()

        loop.threads.run(work, lambda _: None, loop.broke)


class WatchedHost(Protocol):
    """What sees the simulation."""

    loop: SimulatedLoop
    rpc: SimulatedRpc
    failovers: FailoverAudit
    groups: GroupAudit
    adopted: int
    has_noted_commit: bool
    audited: AuditedStore
    aborted: Counter[str]

    def broke(self, error: BaseException) -> None:
        """A check has failed."""

    def passed(self, point: str) -> None:
        """Something has happened that a fault may wait for."""

    def publish(self, state: JobState) -> None:
        """The job has a new state."""

    def happened(self, event: job_events.JobEvent) -> None:
        """The job's machine has taken an event."""

    def quarantined(self, error: Exception) -> None:
        """The job's actor has crashed."""


@contextlib.contextmanager
def watching(host: WatchedHost) -> Iterator[None]:
    """For the time of a simulation."""
    with contextlib.ExitStack() as stack:

        def replace(target: object, name: str, replacement: object) -> None:
            stack.enter_context(mock.patch.object(target, name, replacement))

        _replace_the_machine(host, replace)
        _watch_the_job(host, replace)
        stack.enter_context(host.failovers.watching())
        stack.enter_context(host.groups.watching())
        yield


def _replace_the_machine(host: WatchedHost, replace: Any) -> None:
    """Network, disk space, processes, clock."""
    import grpc.aio

    def server(options: object, interceptors: Any, **_: object) -> SimulatedServer:
        return SimulatedServer(host.rpc, running_loop().owner.port, interceptors)

    def directory_lock(directory: Any) -> DirectoryLock:
        made = running_loop().owner.lock = DirectoryLock(directory)
        return made

    def checkpoint_store(job: JobDescription) -> Any:
        return running_loop().owner.store if job.settings.checkpoints is not None else None

    def savepoint(runner: CheckpointStoreRunner, uri: str) -> SavepointStoreRunner:
        opened = running_loop().owner.open_savepoint
        return SavepointStoreRunner(runner._job_id, uri, runner._store, opened)

    def restore_point(uri: str) -> RestorePoint:
        return open_restore_point(uri, running_loop().owner.open_savepoint)

    def registration(**arguments: Any) -> RegistrationRunner:
        made = running_loop().owner.registration = RegistrationRunner(**arguments)
        return made

    def statvfs(_: object) -> Any:
        free = 0 if running_loop().owner.is_disk_full else 1 << 50
        return SimpleNamespace(f_bavail=max(free, 1 << 27), f_frsize=1)

    replace(grpc.aio, "insecure_channel", host.rpc.channel)
    replace(grpc.aio, "server", server)
    replace(jobmanager_assembly, "DirectoryLock", directory_lock)
    replace(JobDescription, "checkpoint_store", checkpoint_store)
    replace(CheckpointStoreRunner, "savepoint", savepoint)
    replace(checkpoint_starts_runner, "open_restore_point", restore_point)
    replace(job_start_runner, "open_restore_point", restore_point)
    replace(assembly_runner, "SystemClock", lambda: host.loop)
    replace(taskmanager_main, "installed_packages", _installed_packages)
    replace(assembly_runner, "ForkserverRunner", lambda *_, **__: running_loop().owner.forkserver)
    replace(assembly_runner, "RegistrationRunner", registration)
    replace(SlotChannel, "open", open_channel)
    replace(store_calls_runner, "threading", SimpleNamespace(Thread=SimulatedThread))
    replace(ended_checkpoints_runner, "open_store", lambda _: running_loop().owner.store)
    replace(ended_checkpoints_runner, "_CALL_TIMEOUT_MS", 10_000)
    replace(claimed_head_store, "_SWAP_PAUSE_S", 0.0)
    replace(__import__("os"), "fsync", lambda _: None)
    # Messages and paths name it, and their lengths decide how long they take.
    replace(__import__("os"), "getpid", lambda: 12_345)


def _watch_the_job(host: WatchedHost, replace: Any) -> None:
    """Its machine, its actor and its state."""
    step, perform = JobMaster.step, JobMasterRunner._perform
    enter, quarantine = JobRecord.enter, DispatcherRunner._quarantine

    def checked_step(
        master: JobMaster, event: job_events.JobEvent, now_ms: int = 0
    ) -> list[job_effects.JobEffect]:
        before = master.graph.started if isinstance(event, job_events.AttemptsFound) else None
        try:
            effects = step(master, event, now_ms)
            master.check()
            check = getattr(master.coordinator, "check", None)
            if check is not None:
                check()
        except AssertionError as error:
            host.broke(error)
            raise
        if before is not None and not master.was_taken_over:
            host.adopted += len(master.graph.in_state(AttemptState.FINISHED) - before)
        host.happened(event)
        if isinstance(event, c.CheckpointStored | c.CheckpointNotStored):
            host.passed(type(event).__name__)
        for phase in host.groups.entered():
            host.passed(group_point(phase))
        return effects

    def watched_perform(runner: JobMasterRunner, effect: job_effects.JobEffect) -> None:
        try:
            if isinstance(effect, job_effects.DeployTasks):
                host.failovers.deployed([task.attempt for task in effect.tasks])
            elif isinstance(effect, job_effects.CancelTasks) and runner.master.state not in ENDING:
                host.failovers.cancelled(effect.keys)
        except AssertionError as error:
            host.broke(error)
            raise
        if isinstance(effect, job_effects.NoteCommit):
            host.has_noted_commit = True
        if isinstance(effect, c.ReportAborted):
            host.aborted[effect.reason.name] += 1
        perform(runner, effect)
        host.passed(type(effect).__name__)

    def watched_enter(record: JobRecord, state: JobState, now_ms: int) -> None:
        enter(record, state, now_ms)
        host.publish(state)

    async def watched_quarantine(
        dispatcher: DispatcherRunner, job_id: str, error: Exception
    ) -> None:
        host.quarantined(error)
        await quarantine(dispatcher, job_id, error)

    replace(JobMaster, "step", checked_step)
    replace(JobMasterRunner, "_perform", watched_perform)
    replace(JobRecord, "enter", watched_enter)
    replace(DispatcherRunner, "_quarantine", watched_quarantine)
