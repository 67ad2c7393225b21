"""Where each shared file lies, and how many completed checkpoints name it.

Checkpoints that run at the same time may upload the same file of a backend under different paths,
since only files of confirmed checkpoints are referred to. They register in the order in which they
complete: the copy of the first one counts, and later references to the same key are rewritten to it. One
key always stands for the same bytes: another size or checksum under it is an error, since rewriting would
exchange the content of one checkpoint for that of another.

Invariants (``check``):
- the count of an entry (a shared key, or a range that only one checkpoint may name) is the number of
  completed checkpoints registered that name it, and is never 0;
- the location of a key does not change while its entry exists.

Counts are not stored: they are rebuilt by registering the retained checkpoints again.

Source: Flink, SharedStateRegistryImpl. Flink discards a duplicate as soon as it is registered; here it
stays until the checkpoint that uploaded it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import InvariantViolation
from penstock.storage.manifest import SharedIdentity, StoredRange, StoredReference

Identity = SharedIdentity | StoredRange
"""What is counted: the key where there is one, else the range itself."""


class SharedFileMismatch(Exception):  # noqa: N818  (says what happened)
    """The same shared key stands for different bytes."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One reference of an ack.

    Attributes:
        named: as the snapshot says.
        resolved: its location when the ack came; held until the checkpoint has ended.
    """

    named: StoredReference
    resolved: StoredRange


@dataclass(frozen=True, slots=True)
class RegisteredFiles:
    """What a checkpoint is registered with.

    Attributes:
        references: all it refers to, rewritten, each identity once.
        replaced: per key the location that counts, where a snapshot names another one.
    """

    references: tuple[StoredReference, ...]
    replaced: tuple[tuple[SharedIdentity, StoredRange], ...]


class SharedStateRegistry:
    """Counts of everything that completed checkpoints name.

    Example: two checkpoints have uploaded one file of a backend; the copy of the first one counts.
        >>> registry = SharedStateRegistry()
        >>> file = SharedIdentity("counts", subtask_index=0, instance="a", name="000007.sst")
        >>> for checkpoint_id, path in [(1, "chk-1/x"), (2, "chk-2/y")]:
        ...     claim = registry.claim(StoredReference(file, StoredRange(path, 0, 64, checksum=9)))
        ...     registry.register(checkpoint_id, registry.plan([claim]).references)
        >>> claim.resolved.path, registry.count(file)
        ('chk-1/x', 2)
        >>> registry.release(1)
        >>> registry.count(file)
        1
    """

    def __init__(self) -> None:
        self._locations: dict[Identity, StoredRange] = {}
        self._counts: dict[Identity, int] = {}
        self._registered: dict[int, tuple[Identity, ...]] = {}

    def count(self, identity: Identity) -> int:
        """How many registered checkpoints name it."""
        return self._counts.get(identity, 0)

    def counts(self) -> dict[Identity, int]:
        """A copy of all counts."""
        return dict(self._counts)

    def claim(self, reference: StoredReference) -> Claim:
        """Finds out where a reference of an ack lies now.

        Raises:
            SharedFileMismatch: the key is known for other bytes.
        """
        known = self._locations.get(_identity(reference))
        if known is None:
            return Claim(reference, reference.location)
        _check_same(reference, known)
        return Claim(reference, known)

    def plan(self, claims: Iterable[Claim]) -> RegisteredFiles:
        """What a checkpoint of these claims is to be registered with; changes nothing.

        Raises:
            SharedFileMismatch: a key stands for different bytes.
        """
        planned: dict[Identity, StoredReference] = {}
        replaced: dict[SharedIdentity, StoredRange] = {}
        for claim in claims:
            named = claim.named
            identity = _identity(named)
            if identity not in planned:
                location = self._locations.get(identity, claim.resolved)
                planned[identity] = StoredReference(named.identity, location)
            counts = planned[identity].location
            _check_same(named, counts)
            if named.identity is not None and counts != named.location:
                replaced[named.identity] = counts
        return RegisteredFiles(tuple(planned.values()), tuple(replaced.items()))

    def register(self, checkpoint_id: int, references: Iterable[StoredReference]) -> None:
        """Counts a completed checkpoint.

        Where its manifest names another location than the one that counts (possible only for what was
        read back from a store), that file stays as long as the checkpoint, and is nobody else's.

        Args:
            checkpoint_id: not registered yet.
            references: as planned.

        Raises:
            InvariantViolation: it is registered.
        """
        if checkpoint_id in self._registered:
            raise InvariantViolation(f"checkpoint {checkpoint_id} is registered already")
        unique = {_identity(reference): reference.location for reference in references}
        for identity, location in unique.items():
            self._locations.setdefault(identity, location)
            self._counts[identity] = self._counts.get(identity, 0) + 1
        self._registered[checkpoint_id] = tuple(unique)

    def release(self, checkpoint_id: int) -> None:
        """Takes back what ``register`` has counted; entries that nobody names any more are gone."""
        for identity in self._registered.pop(checkpoint_id):
            self._counts[identity] -= 1
            if self._counts[identity] == 0:
                del self._counts[identity]
                del self._locations[identity]

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantViolation: one does not hold.
        """
        counts: dict[Identity, int] = {}
        for identities in self._registered.values():
            for identity in identities:
                counts[identity] = counts.get(identity, 0) + 1
        if counts != self._counts or counts.keys() != self._locations.keys():
            raise InvariantViolation(f"registry: counted {self._counts}, registered {counts}")


def _identity(reference: StoredReference) -> Identity:
    return reference.location if reference.identity is None else reference.identity


def _check_same(reference: StoredReference, known: StoredRange) -> None:
    found = reference.location
    if (found.size_bytes, found.checksum) == (known.size_bytes, known.checksum):
        return
    key = reference.identity
    assert key is not None, "a range without a key is its own identity"
    raise SharedFileMismatch(
        f"file {key.name!r} of operator {key.operator_uid!r}, subtask {key.subtask_index}, backend "
        f"instance {key.instance} lies at {known.path!r} with {known.size_bytes} bytes and checksum "
        f"{known.checksum:#010x}, but was now reported at {found.path!r} with {found.size_bytes} bytes "
        f"and checksum {found.checksum:#010x}: the state backend has used a file name twice; restart "
        f"the job to give its backends new instances"
    )
