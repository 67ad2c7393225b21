"""Which job publishes the output that a savepoint covers, as one object beside its manifest says it.

Either a job that is started from the savepoint commits what was prepared, or a job that goes back behind it produces the
same rows again. Whoever is about to do one of both says so first, by compare-and-swap, and obeys what it finds there.

Invariants: the object is only ever replaced by compare-and-swap; what one job is to commit, nobody takes back, and
what was taken back, nobody commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from penstock.errors import StoreCorrupt, StoreNotFound, StoreTransient
from penstock.storage.object_store import ObjectStore
from penstock.storage.savepoint import COMMITTED_PATH, OUTPUT_PATH, signed

_OPEN: Final = b"open"
"""Nobody's any more: the job that had taken it back has ended before it had produced it again."""
_ATTEMPTS: Final = 16


class OutputUse(Enum):
    """What a job does with it; the value is how the object says it."""

    COMMITS = "committed"
    TAKES_BACK = "taken back"


@dataclass(frozen=True, slots=True)
class OutputClaim:
    """What is done with it, and by which job."""

    use: OutputUse
    job_id: str

    def encode(self) -> bytes:
        """As the first line of the object says it.

        >>> claim = OutputClaim(OutputUse.TAKES_BACK, "6f0c")
        >>> claim.encode(), decode_claim(claim.encode()) == claim
        (b'taken back by job 6f0c', True)
        """
        return f"{self.use.value} by job {self.job_id}".encode()


def decode_claim(content: bytes | None) -> OutputClaim | None:
    """What the object says; None = nothing.

    Raises:
        StoreCorrupt: it cannot be understood.
    """
    said = (_OPEN if content is None else content).partition(b"\n")[0]
    if said == _OPEN:
        return None
    use, by, job_id = said.decode(errors="replace").strip().partition(" by job ")
    if not by or use not in {one.value for one in OutputUse}:
        raise StoreCorrupt(
            f"{OUTPUT_PATH} beside the manifest of the savepoint is damaged: {use[:80]!r}"
        )
    return OutputClaim(OutputUse(use), job_id)


def may_claim(
    found: OutputClaim | None, wanted: OutputClaim, has_ended: Callable[[str], bool]
) -> bool:
    """Whether a claim may take the place of what is there.

    What a job that has ended was to commit may be committed again: that does no harm. Whoever goes back behind what was taken
    back produces it instead.

    Args:
        has_ended: whether a job is known to have ended.

    >>> one, other = (OutputClaim(OutputUse.COMMITS, name) for name in ("one", "other"))
    >>> may_claim(None, one, {"one"}.__contains__), may_claim(one, other, {"one"}.__contains__)
    (True, True)
    >>> may_claim(one, other, set().__contains__)
    False
    """
    if found is None or found == wanted:
        return True
    if found.use is OutputUse.TAKES_BACK:
        return wanted.use is OutputUse.TAKES_BACK
    return wanted.use is OutputUse.COMMITS and has_ended(found.job_id)


def read_claim(store: ObjectStore) -> OutputClaim | None:
    """What the object says now.

    Args:
        store: the directory of the savepoint.

    Raises:
        StoreCorrupt: it cannot be understood.
        StoreTransient: it cannot be read now.
    """
    return decode_claim(_content(store))


def make_claim(
    store: ObjectStore,
    wanted: OutputClaim,
    has_ended: Callable[[str], bool] = lambda _: False,
    note: Callable[[], None] = lambda: None,
) -> OutputClaim:
    """Has the object say what is wanted, where it may; to be repeated after an error.

    Args:
        note: is called before it does, with what is there then: what is released behind it is not claimed.

    Returns:
        What counts: what is wanted, or what is in its way.

    Raises:
        StoreCorrupt: it cannot be understood.
        StoreTransient: it cannot be read or written now, or nobody knows whether it was.
    """
    for _ in range(_ATTEMPTS):
        content = _content(store)
        found = decode_claim(content)
        if found is not None and not may_claim(found, wanted, has_ended):
            return found
        note()
        # What others have taken back stays so where this is released.
        stay = [one for one in _claims(content) if one.use is wanted.use is OutputUse.TAKES_BACK]
        said = _said([wanted, *(one for one in stay if one != wanted)])
        # Also where it says so: what is read may not survive a crash, what was swapped does.
        if store.compare_and_swap(OUTPUT_PATH, content, said):
            return wanted
    raise StoreTransient(f"{OUTPUT_PATH} in {store!r} changed {_ATTEMPTS} times meanwhile")


def release_claim(
    store: ObjectStore,
    own: OutputClaim,
    before: OutputClaim | None = None,
    check: Callable[[], None] = lambda: None,
    *,
    may_come: bool = False,
) -> None:
    """What was claimed is anybody's again, or whose it was before, unless another job has claimed it since.

    Args:
        check: is called before anything changes, with what is there then; raises where that is not to be.
        may_come: a call that claims it may have been given up on, and be made yet: it does not find what it was to replace.

    Raises:
        StoreTransient: it cannot be written now.
    """
    content = _content(store)
    try:
        claims = _claims(content)
    except StoreCorrupt:
        return
    is_as_before = claims == [one for one in [before] if one is not None]
    if own not in claims and not (may_come and is_as_before):
        return
    check()
    left = [one for one in claims if one != own] or ([] if before is None else [before])
    if not store.compare_and_swap(OUTPUT_PATH, content, _said(left)):
        raise StoreTransient(f"{OUTPUT_PATH} in {store!r} has changed meanwhile")


def claim_that_stays(store: ObjectStore) -> set[str]:
    """What is to stay of a savepoint that is removed: that a job commits its output, which the one that it was taken of has to find.

    Raises:
        StoreTransient: it cannot be read now.
    """
    try:
        found = read_claim(store)
    except StoreCorrupt:
        return {OUTPUT_PATH}
    is_needed = found is not None and found.use is OutputUse.COMMITS
    return {OUTPUT_PATH} if is_needed and not store.sizes([COMMITTED_PATH]) else set()


def _claims(content: bytes | None) -> list[OutputClaim]:
    """The one that counts, and behind the token those of others who take it back as well, the newest first."""
    first, _, *others = [*(content or b"").split(b"\n"), b""]
    lines = [content if content is None else first, *filter(None, others)]
    return [claim for line in lines if (claim := decode_claim(line)) is not None]


def _said(claims: Sequence[OutputClaim]) -> bytes:
    """What the object says: the one that counts, and behind the token the others."""
    first = claims[0].encode() if claims else _OPEN
    return signed(first) + b"".join(one.encode() + b"\n" for one in claims[1:])


def _content(store: ObjectStore) -> bytes | None:
    try:
        return store.get(OUTPUT_PATH)
    except StoreNotFound:
        return None
