"""Whether a job commits the output that sinks had prepared in what it starts from.

A checkpoint that HEAD names lets its output be committed by whoever goes on from it, as often as need be. A savepoint
says beside its manifest what has become of it; where it says nothing, only the user knows, and a job that is to commit it
says so there before it does (``claim_output``). So does one that goes back behind it, which produces it again.
The client that plans and the JobManager that starts ask the same question here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.errors import JobRejected, StoreCorrupt, StoreNotFound, StoreTransient, StreamError
from penstock.pb import graph_pb2
from penstock.storage.manifest import decode_manifest
from penstock.storage.object_store import FIRST_ANSWER_MS, ObjectStore
from penstock.storage.open_store import is_s3, open_store
from penstock.storage.output_claim import (
    OutputClaim,
    OutputUse,
    make_claim,
    may_claim,
    release_claim,
)
from penstock.storage.prepared_output import (
    PreparedOutput,
    claim_beside,
    has_prepared_output,
    savepoint_output,
)
from penstock.storage.restore_point import RestorePoint
from penstock.storage.savepoint import MANIFEST_PATH, OUTPUT_PATH
from penstock.storage.store_names import without_slash

IN_DOUBT_KEY: Final = "execution.state-recovery.in-doubt"


@dataclass(frozen=True, slots=True)
class OutputDecision:
    """What becomes of prepared output.

    Attributes:
        commits: the job that is started commits it.
        refusal: why it cannot be started as it was asked for; "" = it can.
        claimant: the job that is to commit it so far, and has to have ended; "" = none is.

    >>> OutputDecision(True).said
    'commit'
    >>> OutputDecision(False, "nobody knows whether it was committed").said
    'leave'
    """

    commits: bool
    refusal: str = ""
    claimant: str = ""

    @property
    def said(self) -> str:
        """As the configuration says it."""
        return "commit" if self.commits else "leave"


def decide_output(
    point: RestorePoint,
    said: str | None,
    job_id: str = "",
    has_ended: Callable[[str], bool] = lambda _: True,
) -> OutputDecision:
    """What becomes of the output that is prepared in it.

    Args:
        said: "commit" | "leave"; None = nothing.
        job_id: of the job that is started; "" = nobody knows yet.
        has_ended: whether a job is known to have ended.

    Raises:
        StoreTransient: it cannot be read now.
    """
    if not point.is_savepoint:
        return OutputDecision(said != "leave", _refusal_behind(point, job_id))
    if not has_prepared_output(point.manifest):
        return OutputDecision(False)
    store, found = _found(point)
    if found is PreparedOutput.COMMITTED:
        return OutputDecision(False)
    claim = claim_beside(store, store.first_parts())
    if found is PreparedOutput.TAKEN_BACK:
        by = point.manifest.job_id if claim is None else claim.job_id
        refusal = (
            f"the output that it covers cannot be committed: job {by} has gone back behind it and "
            "produces that itself: say --in-doubt leave"
        )
        return OutputDecision(False, refusal if said == "commit" else "")
    if said is None:
        whose = (
            ""
            if claim is None
            else f", or by job {claim.job_id}, which was started from it to do so"
        )
        return OutputDecision(
            False,
            f"nobody knows whether the output that it covers was committed by the job that it was taken of{whose}; "
            "look, and say --in-doubt commit (this job commits it) or --in-doubt leave (it was committed, or is not "
            "wanted)",
        )
    if said != "commit" or claim is None or claim.job_id == job_id:
        return OutputDecision(said == "commit")
    if not may_claim(claim, OutputClaim(OutputUse.COMMITS, job_id), has_ended):
        return OutputDecision(False, _is_claimed(point, claim))
    return OutputDecision(True, claimant=claim.job_id)


def _is_claimed(point: RestorePoint, claim: OutputClaim) -> str:
    return (
        f"the output that it covers is committed by job {claim.job_id}, which was started from it: say --in-doubt leave; "
        f"where that job is no more, and has committed nothing, remove {point.uri}/{OUTPUT_PATH}"
    )


def _refusal_behind(point: RestorePoint, job_id: str) -> str:
    """Why a job cannot go on from a checkpoint: what it produces again another job has committed, or is to commit."""
    for path in point.open_savepoints:
        claim = committed_elsewhere(path, job_id)
        if claim is not None:
            return was_committed(path, claim)
    return ""


def committed_elsewhere(path: str, job_id: str) -> OutputClaim | None:
    """Which job commits the output of a savepoint, so that this one cannot go back behind it; None = none does.

    Raises:
        StoreTransient: it cannot be read now.
    """
    try:
        store = open_store(path)
        claim = claim_beside(store, store.sizes([OUTPUT_PATH]))
    except StoreTransient as error:
        raise StoreTransient(cannot_be_asked(path, error)) from error
    is_free = claim is None or may_claim(claim, _takes_back(job_id), lambda _: False)
    return None if is_free else claim


def was_committed(path: str, claim: OutputClaim) -> str:
    """Why no job goes back behind a savepoint."""
    return (
        f"savepoint {path} was taken behind it, and the output which that covers is committed by job {claim.job_id}, which was "
        f"started from it with --in-doubt commit: what comes behind the older checkpoint would be published twice; start from "
        f"{path} with --in-doubt leave"
    )


def cannot_be_asked(path: str, error: StreamError) -> str:
    """Why nobody knows whether a savepoint may be gone back behind, and what to do."""
    return (
        f"savepoint {path} was taken behind the checkpoint that is gone on from, and whether another job commits the output "
        f"which it covers cannot be read: {error}; where it is gone for good, make an empty directory or bucket of its name"
    )


def _takes_back(job_id: str) -> OutputClaim:
    return OutputClaim(OutputUse.TAKES_BACK, job_id)


def claim_output(
    point: RestorePoint,
    decision: OutputDecision,
    job_id: str,
    has_ended: Callable[[str], bool],
    note: Callable[[], None] = lambda: None,
) -> str:
    """Says where others look what a job is about to do with output; before it does so. To be repeated after an error.

    Args:
        note: is called before each time that it is said.

    Returns:
        Why the job that a moved savepoint was taken of cannot be told; "" = it can, or needs not.

    Raises:
        JobRejected: another job has been faster.
        StoreTransient: it cannot be said now.
    """
    try:
        if not point.is_savepoint:
            for path in point.open_savepoints:
                store = open_store(path)
                if not store.sizes([MANIFEST_PATH, OUTPUT_PATH]):
                    continue  # it never came to be, or is gone, and nobody is to commit its output
                made = make_claim(store, _takes_back(job_id), note=note)
                if made.use is not OutputUse.TAKES_BACK:
                    raise JobRejected(
                        f"{point.uri} cannot be started from: {was_committed(path, made)}"
                    )
        elif decision.commits:
            wanted = OutputClaim(OutputUse.COMMITS, job_id)
            made = make_claim(_deciding_store(point), wanted, has_ended, note)
            untold = ""
            if made == wanted and (left := _left_behind(point)) is not None:
                try:
                    made = make_claim(left, wanted, has_ended, note)
                except StoreTransient as error:
                    untold = f"{left!r}, where it was taken, cannot be told: {error}"
            if made != wanted:
                raise JobRejected(
                    f"{point.uri} cannot be started from with --in-doubt commit: meanwhile the output that it covers "
                    f"is {made.use.value} by job {made.job_id}; say --in-doubt leave"
                )
            return untold
    except StoreCorrupt as error:
        raise JobRejected(f"{point.uri} cannot be started from: {error}") from error
    return ""


def release_output(
    point: RestorePoint,
    decision: OutputDecision,
    job_id: str,
    check: Callable[[], None],
    *,
    may_come: bool = True,
) -> None:
    """Undoes ``claim_output`` for a job that never began; what was not claimed is nobody else's either.

    Args:
        check, may_come: as of ``release_claim``.

    Raises:
        StoreTransient: it cannot be said now.
    """
    if not point.is_savepoint:
        for path in point.open_savepoints:
            store = open_store(path)
            is_there = may_come and bool(store.sizes([MANIFEST_PATH, OUTPUT_PATH]))
            release_claim(store, _takes_back(job_id), None, check, may_come=is_there)
    elif decision.commits:
        claimant = decision.claimant
        before = OutputClaim(OutputUse.COMMITS, claimant) if claimant else None
        own, deciding = OutputClaim(OutputUse.COMMITS, job_id), _deciding_store(point)
        beside = deciding.sizes([MANIFEST_PATH, OUTPUT_PATH])
        if (left := _left_behind(point)) is not None:  # claimed last
            is_claimed = may_come and claim_beside(deciding, beside) == own
            release_claim(left, own, before, check, may_come=is_claimed)
        release_claim(deciding, own, before, check, may_come=may_come and bool(beside))


def _found(point: RestorePoint) -> tuple[ObjectStore, PreparedOutput]:
    """Where it is said what becomes of it, and what has become of it."""
    store = _deciding_store(point)
    beside = {*store.first_parts(), *point.store.first_parts()}
    return store, savepoint_output(point.manifest, store, beside)


def original_not_asked(point: RestorePoint) -> str:
    """Why a copy of a savepoint decides about its output by itself: the directory in which that was taken cannot be read,
    and a job that it was taken of, or that was started there, may publish the output as well; "" = it can, or is no more."""
    try:
        _original(point)
    except StoreNotFound:
        return ""
    except StreamError as error:
        return f"{without_slash(point.manifest.properties.target)}, where it was taken, cannot be asked: {error}"
    return ""


def _deciding_store(point: RestorePoint) -> ObjectStore:
    """The directory in which it is said: of a copy, the one in which the savepoint was taken, as long as that is there."""
    try:
        return _original(point)
    except StreamError:  # which whoever starts from the copy is told (``original_not_asked``)
        return point.store


def _original(point: RestorePoint) -> ObjectStore:
    """The directory in which a savepoint was taken; its own where another one is there now.

    Raises:
        StreamError: it cannot be read, or is no more.
    """
    target = without_slash(point.manifest.properties.target)
    if target in ("", point.uri):
        return point.store
    store = open_store(target)
    store.check_answers(FIRST_ANSWER_MS)
    taken = decode_manifest(store.get(MANIFEST_PATH), target)
    own = point.manifest
    is_same = (taken.job_id, taken.checkpoint_id) == (own.job_id, own.checkpoint_id)
    return store if is_same else point.store


def _left_behind(point: RestorePoint) -> ObjectStore | None:
    """The directory from which a savepoint was moved, where its original looks before it produces the output again; None =
    it is there still, or there is no place for it (on another machine).

    Raises:
        StoreTransient: it cannot be looked at now.
    """
    try:
        _original(point)
    except StoreNotFound:
        target = without_slash(point.manifest.properties.target)
    except StreamError:
        return None
    else:
        return None
    if not is_s3(target):
        try:
            open_store(target.rpartition("/")[0] or "/").first_parts()
        except StoreNotFound:
            return None
    return open_store(target)


def decided_output(graph: graph_pb2.JobGraph) -> OutputDecision:
    """What was decided when the job was accepted."""
    return OutputDecision(graph.config.get(IN_DOUBT_KEY) != "leave")


def fate_of_output(point: RestorePoint, decision: OutputDecision) -> PreparedOutput:
    """What becomes of prepared output with a start, as it is shown.

    Raises:
        StoreTransient: it cannot be read now.
    """
    if not has_prepared_output(point.manifest):
        return PreparedOutput.NONE
    if point.is_savepoint:
        _, found = _found(point)
        is_open = found in (PreparedOutput.IN_DOUBT, PreparedOutput.CLAIMED)
        if not is_open or decision.refusal:
            return found
    return PreparedOutput.COMMITTED_HERE if decision.commits else PreparedOutput.LEFT
