"""What all kinds of state have in common: how they are declared, bound and typed.

A state is declared as an attribute of a function's class (or set in its ``__init__``). The declaration
says name, type and options and holds nothing. When the runtime opens the function it *binds* every
declaration: a copy of it that knows its column in the state backend becomes an attribute of the instance,
so two operators that use the same class, or two instances of it, never share anything.

Bound state of a key is a view of the *scope*: the runtime moves the scope from row to row, and the
state's methods find the current key's cell there. Where there is no key (in ``open``, on an unkeyed
stream, in ``process_broadcast``) every access is an error that says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal, NoReturn, Self

import pyarrow as pa
from typing_extensions import override

from penstock.errors import ExpressionError, JobRejected
from penstock.expressions import data_type
from penstock.rows.column_values import decode, short_repr, without_scalars
from penstock.rows.conforming import conformed_column
from penstock.storage.codec import StateCodec, StateError, codec_of
from penstock.storage.codec_migration import check_fields
from penstock.units import argument_ms

MSGPACK: Final = "msgpack"
"""As the type of a state: plain Python values."""

PICKLE: Final = "pickle"
"""As the type of a state: any Python object. Its class must still be there when the state is read."""

OWN_NAMES: Final = "timers."
"""What names of states of the runtime start with; no user's state does."""

_ASK_FOR_IT = "ask for what it holds, .value() or .get(), and compare that"
_CODECS = {MSGPACK: "msgpack/1", PICKLE: "pickle/1"}
_PYTHON_TYPES: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
}
_PLAIN_PYTHON_TYPES = frozenset({dict, list, tuple, set, frozenset, object})
_UPDATES = ("write", "read_and_write")
_VISIBILITIES = ("never_return_expired", "return_if_not_cleaned_up")


@dataclass(frozen=True, slots=True, init=False)
class Ttl:
    """How long a value lives after it was written (or read), by the wall clock.

    Each item of a list and each entry of a map has its own time. Expired values are removed as they are
    met and in the background; snapshots do not write them, but may refer to files that hold them.

    Attributes:
        ttl_ms: time to live.
        update: what starts it anew: "write" (creation and every update) or "read_and_write".
        visibility: "never_return_expired", or "return_if_not_cleaned_up": an expired value is still
            returned while it is there.
    """

    ttl_ms: int
    update: Literal["write", "read_and_write"]
    visibility: Literal["never_return_expired", "return_if_not_cleaned_up"]

    def __init__(
        self,
        ttl: str | float | timedelta,
        update: Literal["write", "read_and_write"] = "write",
        visibility: Literal[
            "never_return_expired", "return_if_not_cleaned_up"
        ] = "never_return_expired",
    ) -> None:
        milliseconds = argument_ms("Ttl", ttl)
        if milliseconds <= 0:
            raise JobRejected(f"Ttl({ttl!r}): the time to live must be longer than 0 ms")
        if update not in _UPDATES:
            raise JobRejected(f"Ttl: update={update!r} is none of {', '.join(_UPDATES)}")
        if visibility not in _VISIBILITIES:
            raise JobRejected(
                f"Ttl: visibility={visibility!r} is none of {', '.join(_VISIBILITIES)}"
            )
        object.__setattr__(self, "ttl_ms", milliseconds)
        object.__setattr__(self, "update", update)
        object.__setattr__(self, "visibility", visibility)


class StateScope:
    """Where a function is: the key it is called for, and the time. Moved by the runtime.

    Attributes:
        slot: of the current key in all columns; None = there is no key.
        now_ms: wall-clock time that TTLs are measured by.
        absence: why there is no key, for errors: "in open()".
        may_write_broadcast: broadcast state may be changed here.
        slots_of: slots of keys of the current batch, row by row; None where there is no such batch.
    """

    __slots__ = ("absence", "may_write_broadcast", "now_ms", "slot", "slots_of")

    def __init__(self) -> None:
        self.slot: Any = None
        self.now_ms = 0
        self.absence = ""
        self.may_write_broadcast = False
        self.slots_of: Callable[[pa.Array], Sequence[int]] | None = None


_NO_SCOPE = StateScope()


class State(ABC):  # noqa: B024 - the methods are those of the subclasses
    """A named state of a function.

    Attributes:
        name: unique within the function; stored with the state.
    """

    _declaration: State | None = None

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name or not name.isprintable() or name != name.strip():
            raise JobRejected(
                f"{type(self).__name__}({name!r}): the name of a state is a text such as 'seen'"
            )
        if name.startswith(OWN_NAMES):
            raise JobRejected(
                f"{type(self).__name__}({name!r}): names that start with {OWN_NAMES!r} are Penstock's own"
            )
        self.name = name

    @property
    def declaration(self) -> State:
        """What this state was bound from; itself where it is not bound."""
        return self._declaration or self

    @property
    def is_bound(self) -> bool:
        """True within a running function."""
        return self._declaration is not None

    def __bool__(self) -> bool:
        """Of a state of one value: refused, since it would be true whatever is in it."""
        if not self.is_bound:
            return True
        raise StateError(f"{self!r} is neither true nor false: {_ASK_FOR_IT}")

    @override
    def __eq__(self, other: object) -> bool:
        if self is other or not self.is_bound or isinstance(other, State):
            return self is other
        raise StateError(f"{self!r} is compared with {short_repr(other)}: {_ASK_FOR_IT}")

    __hash__ = object.__hash__

    def _copy(self) -> Self:
        bound = object.__new__(type(self))
        for name, value in vars(
            self
        ).items():  # not copy.copy: with it a call of a method takes twice as long
            setattr(bound, name, value)
        bound._declaration = self
        return bound

    def _misfit(
        self, value: object, codec: StateCodec, error: ValueError, what: str = ""
    ) -> StateError:
        reason = f", {error}" if str(error) else ""
        return StateError(
            f"state {self.name!r}{what} holds {codec.expected}, "
            f"got {short_repr(value)} ({type(value).__name__}){reason}"
        )

    def _stored(self, value: object, codec: StateCodec, what: str = "") -> Any:
        """The stored form of a value.

        Raises:
            StateError: it does not fit.
        """
        try:
            return codec.to_stored(value)
        except ValueError as error:
            raise self._misfit(value, codec, error, what) from error

    def _check_items(self, items: object, method: str) -> None:
        """Refuses what is no list of items, text included.

        Raises:
            StateError: it is none.
        """
        if isinstance(items, str | bytes) or not isinstance(items, Iterable):
            raise StateError(
                f"state {self.name!r}: {method}() takes a list of items, got {short_repr(items)}"
            )

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class KeyedState(State):
    """A state with content per key.

    Args:
        name: unique within the function.
        type: of the values: an Arrow type or its name, ``bool``, ``int``, ``float``, ``str``, ``bytes``,
            or ``ps.MSGPACK`` for plain Python values (default), ``ps.PICKLE`` for any object.
        ttl: how long values live; None = for ever.
        codec: "msgpack" or "pickle" for values that are to be stored so, whatever ``type`` says.
        queryable: refused until state can be asked for from outside of the job.

    Attributes:
        codec: of the values.
        key_codec: of the keys of a map, None for others.
    """

    kind: ClassVar[Literal["value", "list", "map"]]
    codec: StateCodec
    key_codec: StateCodec | None = None
    _scope: StateScope = _NO_SCOPE
    _column: Any = None

    def __init__(
        self,
        name: str,
        type: Any = None,
        *,
        ttl: Ttl | None = None,
        codec: str | None = None,
        queryable: bool = False,
    ) -> None:
        super().__init__(name)
        if ttl is not None and not isinstance(ttl, Ttl):
            raise JobRejected(f"state {name!r}: ttl={ttl!r} is no ps.Ttl; write ps.Ttl('1h')")
        self.codec = codec_for(type, codec, f"state {name!r}")
        self.ttl = ttl
        if queryable:
            raise JobRejected(
                f"state {name!r}: queryable={queryable!r}: there are no queries of state from outside yet, so "
                "it would do nothing: leave it out"
            )
        self._ttl_ms = 0 if ttl is None else ttl.ttl_ms
        self._reads_stamp = ttl is not None and ttl.update == "read_and_write"
        self._returns_expired = ttl is not None and ttl.visibility == "return_if_not_cleaned_up"
        self._is_plain = self.codec.is_immutable and ttl is None

    @property
    def ttl_ms(self) -> int:
        """Time to live, 0 = for ever."""
        return self._ttl_ms

    def bind(self, column: Any, scope: StateScope) -> Self:
        """The state within a running function.

        Args:
            column: of the backend, for this state.
            scope: tells the current key.
        """
        bound = self._copy()
        bound._column = column
        bound._scope = scope
        bound.enter()
        return bound

    def enter(self) -> None:
        """Called when a bundle of keys has come into reach."""

    @abstractmethod
    def is_present(self, slot: int) -> bool:
        """Whether a key has content, expired or not."""

    def _slot(self, method: str) -> int:
        """The current key's slot.

        Raises:
            StateError: there is none.
        """
        slot = self._scope.slot
        if slot is None:
            self._no_key(method)
        return int(slot)

    def _no_key(self, method: str) -> NoReturn:
        if not self.is_bound:
            raise StateError(
                f"state {self.name!r}: {method}() was called on its declaration; state is there when the "
                "function runs in a job, as self.<attribute> in process() and on_timer()"
            ) from None
        raise StateError(
            f"state {self.name!r}: {method}() needs a key, and there is none "
            f"{self._scope.absence or 'here'}; state of a key is there in process() and on_timer() of "
            "functions on a keyed stream"
        ) from None

    def _slots(self, keys: pa.Array, method: str) -> Sequence[int]:
        """The slots of keys of the current batch.

        Raises:
            StateError: there is no batch, or a key is not in it.
        """
        slots_of = self._scope.slots_of
        if slots_of is None:
            raise StateError(
                f"state {self.name!r}: {method}() is there in KeyedBatchFunction.process_batch() only"
            )
        return slots_of(keys)

    def _pairs(
        self, keys: pa.Array, values: Any, type_: pa.DataType | None, method: str
    ) -> list[tuple[int, Any]]:
        """The slots of n keys of the batch, with n values.

        Raises:
            StateError: there are not as many values as keys, or a value would be cut.
        """
        slots = self._slots(keys, method)
        try:
            values = _python_values(values, pa.field(self.name, type_) if type_ else None)
        except ValueError as error:
            raise StateError(f"state {self.name!r}: {method}(): {error}") from error
        self._check_counts(len(slots), len(values), method)
        return list(zip(slots, values, strict=True))

    def _check_counts(self, keys: int, values: int, method: str) -> None:
        if keys != values:
            raise StateError(f"state {self.name!r}: {method}() got {keys} keys and {values} values")

    def _is_expired(self, stamp_ms: int) -> bool:
        return stamp_ms + self._ttl_ms <= self._scope.now_ms

    def _array(self, values: list[Any], type_: pa.DataType | None) -> pa.Array:
        if type_ is None:
            raise StateError(
                f"state {self.name!r}: get_many() gives an Arrow array, and values of type "
                f"{self.codec.expected} do not fit one; declare the state with an Arrow type"
            )
        return pa.array(values, type_)


def _python_values(values: Any, field: pa.Field | None) -> list[Any]:
    """What a function puts into the state of many keys, as Python values: none is cut before its codec sees it.

    Args:
        values: an Arrow array, a list, or columns of other libraries.
        field: name of the state and type of the values, None where they have none.

    Raises:
        ValueError: they are no values in an order, or one does not fit.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray):
        whole = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        return decode(whole)
    if hasattr(values, "__array__"):
        column = pa.array(values)
        return decode(column if field is None else conformed_column(column, field))
    if isinstance(values, str | bytes | Mapping | AbstractSet) or not isinstance(values, Iterable):
        raise ValueError(f"it takes a value for each key, in order, got {short_repr(values)}")  # noqa: TRY004 - as above
    return without_scalars(values)


def codec_for(type_: Any, codec: str | None, where: str) -> StateCodec:
    """The codec that a declaration means.

    Args:
        type_: as the user gave it.
        codec: as the user gave it.
        where: for errors: "state 'seen'".

    Raises:
        JobRejected: it means none.
    """
    if codec is not None:
        if codec not in _CODECS:
            raise JobRejected(f"{where}: codec={codec!r} is none of {', '.join(_CODECS)}")
        return codec_of(_CODECS[codec])
    if type_ is None or (isinstance(type_, type) and type_ in _PLAIN_PYTHON_TYPES):
        return codec_of(_CODECS[MSGPACK])
    if isinstance(type_, str) and type_ in _CODECS:
        return codec_of(_CODECS[type_])
    if isinstance(type_, type) and type_ in _PYTHON_TYPES:
        return codec_of(_PYTHON_TYPES[type_])
    if not isinstance(type_, str | pa.DataType):
        raise JobRejected(
            f"{where}: {type_!r} is no type; use an Arrow type such as pa.int64(), its name, bool, int, "
            "float, str, bytes, ps.MSGPACK for plain Python values, or ps.PICKLE for any object"
        )
    try:
        arrow_type = data_type(type_)
        check_fields(arrow_type)
        return codec_of(arrow_type)
    except (ExpressionError, JobRejected, StateError) as error:
        raise JobRejected(f"{where}: {error}") from error
