"""Savepoints and stops that users ask for in a simulation: their directories, their answers, and what they must be.

A directory is looked through after every change, as the checkpoint store is: once it has a manifest, all that this
names is there. Who asks and hears nothing, since the JobManager has died or ended, asks the next one, under the same
id. What was visible and prepared outside of the cluster at the moment of completion is kept beside a copy of the
directory: a job that starts from the copy there has to come to what the oracle says.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import override

from jobmanager.checkpoint.messages import AbortReason
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from penstock.errors import StreamError
from penstock.pb import checkpoint_pb2
from penstock.storage.checkpoint_properties import SavepointFormat
from penstock.storage.manifest import decode_manifest, properties_of, references
from penstock.storage.object_store import ObjectStore
from penstock.storage.savepoint import (
    BESIDE_MANIFEST,
    COMMITTED_PATH,
    GIVEN_UP,
    MANIFEST_PATH,
    savepoint_name,
)
from penstock.storage.store_names import substore
from tests.support.savepoint_marks import marks_beside
from tests.support.simulated_store import AuditedStore, Countdown, StoreAccess, StoreWeather


class Wish(enum.Enum):
    """What is asked for."""

    SAVEPOINT = "savepoint"
    STOP = "stop"
    DRAIN = "stop --drain"


@dataclass(eq=False)
class Asked:
    """One request of a user.

    Attributes:
        is_taken: it is answered, and was done.
        error: it is answered, and was not.
    """

    operation_id: str
    wish: Wish
    format: SavepointFormat
    path: str
    is_taken: bool = False
    error: StreamError | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the user knows what came of it."""
        return self.is_taken or self.error is not None

    async def ask(
        self, dispatcher: DispatcherRunner, job_id: str, is_over: Callable[[], bool]
    ) -> None:
        """Asks a JobManager and waits for its answer.

        Args:
            is_over: whether the JobManager is about to end, so that its answer counts for nothing.
        """
        directory = self.path.rpartition("/")[0]
        try:
            if self.wish is Wish.SAVEPOINT:
                operation = await dispatcher.operations.savepoint(
                    job_id, self.operation_id, directory, self.format
                )
            else:
                operation = await dispatcher.operations.stop(
                    job_id,
                    self.operation_id,
                    directory,
                    self.format,
                    drain=self.wish is Wish.DRAIN,
                )
        except StreamError as error:
            if is_over():
                return
            self.error = error
        else:
            assert operation.path == self.path
            self.is_taken = True
        assert not (self.is_taken and self.error), f"{self.path} was taken, and not: {self.error}"


class SavepointDirectory(AuditedStore):
    """The objects in the directory of one savepoint.

    Args:
        uri: its name.
        on_complete: called when its manifest is there.
    """

    def __init__(
        self,
        uri: str,
        on_broken: Callable[[AssertionError], None],
        on_complete: Callable[[SavepointDirectory], None] = lambda _: None,
    ) -> None:
        super().__init__(on_broken)
        self.uri = uri
        self._on_complete = on_complete
        self._was_complete = False

    @property
    def manifest(self) -> checkpoint_pb2.CheckpointManifest | None:
        """What it holds; None = it is not complete, or was given up."""
        if MANIFEST_PATH not in self.paths():
            return None
        content = self.objects.get(MANIFEST_PATH)
        return None if content == GIVEN_UP else decode_manifest(content, self.uri)

    @override
    def named(self) -> set[str]:
        manifest = self.manifest
        if manifest is None:
            return set()
        self.audits += 1
        sizes = {found.path: found.size_bytes for found in self.objects.list("")}
        named = {MANIFEST_PATH}
        for reference in references(manifest):
            location = reference.location
            found = sizes.get(location.path)
            assert found is not None, f"{self.uri} refers to {location.path}, which is not there"
            assert found >= location.offset + location.size_bytes, (
                f"{self.uri} refers to {location.path}, which is too short"
            )
            named.add(location.path)
        if not self._was_complete:
            self._was_complete = True
            self._on_complete(self)
        return named

    def copy(self) -> SavepointDirectory:
        """What it is now, without what is noted beside the manifest."""
        made = SavepointDirectory(self.uri, self._on_broken)
        for path in self.named():
            made.objects.put(path, [self.objects.get(path)])
        return made


class _Access(StoreAccess):
    """A directory as one process sees it."""

    copies = False
    """Whether the store takes over files of another one by itself."""

    @override
    def can_copy_from(self, source: ObjectStore) -> bool:
        return self.copies and isinstance(source, StoreAccess)

    @override
    def copy_from(self, source: ObjectStore, paths: Mapping[str, str]) -> None:
        assert isinstance(source, StoreAccess)
        self._enter(f"copy {len(paths)}")
        for path, target in paths.items():
            self._audited.objects.put(target, [source._audited.objects.get(path)])
        self._leave(f"copy {len(paths)}")


class SavepointsHost(Protocol):
    """What is needed of the simulation."""

    random: random.Random

    def broke(self, error: BaseException) -> None:
        """A check has failed."""

    def tell(self, process: str, text: str) -> None:
        """Something has happened."""


@dataclass(eq=False)
class SimulatedSavepoints:
    """All of one job.

    Attributes:
        directory: that users name.
        copies: whether its store takes over files of the job's store by itself.
        head_id: the newest checkpoint that HEAD names now; 0 = none.
        on_complete: called with each that is complete now.
        stopped: path of the savepoint with which HEAD says the job is stopped; "" = it does not.
    """

    host: SavepointsHost
    job_id: str
    directory: str
    copies: bool = False
    head_id: Callable[[], int] = lambda: 0
    on_complete: Callable[[SavepointDirectory], None] = lambda _: None
    asked: list[Asked] = field(default_factory=list)
    stores: dict[str, SavepointDirectory] = field(default_factory=dict)
    stopped: str = ""

    def is_one(self, uri: str) -> bool:
        """Whether a store of this name is the directory of a savepoint."""
        return uri.startswith(f"{self.directory}/")

    def open(
        self, uri: str, weather: Callable[[], StoreWeather], countdown: Countdown | None = None
    ) -> StoreAccess:
        """A directory, for one more process.

        Args:
            countdown: of the process' calls.
        """
        store = self.stores.get(uri)
        if store is None:
            store = SavepointDirectory(uri, self.host.broke, self._completed)
            self.stores[uri] = store
        access = _Access(store, self.host.random, weather, countdown)
        access.copies = self.copies
        return access

    def _completed(self, store: SavepointDirectory) -> None:
        manifest = store.manifest
        assert manifest is not None
        self.host.tell("", f"savepoint {manifest.checkpoint_id} is complete")
        if self.is_of_checkpoint(store.uri):
            assert manifest.checkpoint_id == self.head_id(), (
                f"HEAD does not name that of {store.uri}"
            )
        self.on_complete(store)

    def is_of_checkpoint(self, uri: str) -> bool:
        """Whether a savepoint is made of a checkpoint, which HEAD names first."""
        [asked] = [one for one in self.asked if one.path == uri]
        is_native = asked.format is SavepointFormat.NATIVE
        return self.copies and is_native and asked.wish is Wish.SAVEPOINT

    def wish(self, wish: Wish, format: SavepointFormat) -> Asked:
        """One more request, for whoever serves to answer."""
        operation_id = f"op{len(self.asked)}"
        path = substore(self.directory, savepoint_name(self.job_id, operation_id))
        made = Asked(operation_id, wish, format, path)
        self.asked.append(made)
        return made

    @property
    def unanswered(self) -> list[Asked]:
        """Requests whose users wait."""
        return [one for one in self.asked if not one.is_answered]

    def look_at_head(self, newest: checkpoint_pb2.CheckpointManifest) -> None:
        """HEAD ends with this checkpoint: what it says of a stop holds, and no savepoint is ever in it."""
        properties = properties_of(newest.properties)
        assert not properties.is_savepoint, f"savepoint {newest.checkpoint_id} is in HEAD"
        if properties.is_stop:
            self.stopped = properties.target
            assert self.stores[self.stopped].manifest is not None, "HEAD comes behind the savepoint"
        assert properties.is_stop or not self.stopped, "nothing comes behind the end"

    def check_end(self, *, has_finished: bool, is_cancelled: bool, is_calm: bool) -> None:
        """The job has ended, and everybody has been answered.

        Args:
            is_calm: nothing has failed that keeps anybody from cleaning up.
        """
        for one in self.asked:
            store = self.stores.get(one.path)
            manifest = store.manifest if store is not None else None
            marks = set() if store is None else marks_beside(store.objects)
            assert len(marks) < 2, f"the output of {one.path} was committed, and was not"
            assert AbortReason.SUBSUMED.value not in str(one.error), f"{one.path}: {one.error}"
            if one.is_taken:
                assert store is not None, f"{one.path} was never written"
                assert store.named(), f"{one.path} is gone"
                assert marks == {COMMITTED_PATH}, f"nobody says that {one.path} is committed"
            assert not (has_finished and "--in-doubt commit" in str(one.error)), one.error
            if one.is_taken and one.wish is not Wish.SAVEPOINT:
                assert self.stopped == one.path, f"{one.path} was taken, and HEAD does not say so"
            if one.path == self.stopped:
                assert manifest is not None, f"{one.path} is gone, with which the job was stopped"
            elif one.wish is not Wish.SAVEPOINT and is_calm:
                assert manifest is None, f"{one.path} is there, and the job was not stopped with it"
            if store is not None and is_calm:
                left = store.paths() - store.named() - BESIDE_MANIFEST
                assert not left, f"{one.path} has files that nothing names: {left}"
        assert not self.stopped or has_finished or is_cancelled, (
            "a job that is stopped has finished"
        )

    def is_for_going_on(self, uri: str) -> bool:
        """Whether event time goes on behind it."""
        return any(one.path == uri and one.wish is not Wish.DRAIN for one in self.asked)
