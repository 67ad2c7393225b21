"""Credit accounting of one channel, in bytes, for both of its ends (pure).

The receiver opens a channel with a window. The sender spends credit with every batch; the receiver
gives it back once its task has taken batches worth half of the window, so that one CREDIT frame
stands for many batches. Control elements cost nothing.

A batch may go when its charge is covered, or when at least half of the window is free. The second
half of the rule is what lets a batch larger than the whole window through, and what makes the pair
free of deadlock: the receiver keeps back less than half, so an empty channel always has half free.

Invariants:
    - the sender's available credit never exceeds the window,
    - unreturned bytes at the receiver <= max(window, window / 2 + one batch),
    - when the receiver has taken everything it was sent, the sender may send any batch.
"""

from __future__ import annotations

from penstock.errors import StreamError

BATCH_OVERHEAD_BYTES = 256
"""Charged per batch beside its payload, so that many tiny batches are bounded too."""


class CreditError(StreamError):
    """The other end of a channel does not keep to its credit."""


def charge_of(payload_bytes: int) -> int:
    """What a batch of this size costs."""
    return payload_bytes + BATCH_OVERHEAD_BYTES


_NEAR_WINDOWS_OF_ALL = 2
_FAR_WINDOWS = 8
_FAR_WINDOWS_OF_ALL = 32


def near_windows(channels: int) -> int:
    """How many windows each channel has that comes straight from its producer, of so many of one gate.

    Rows in them are what a barrier waits behind; a channel alone needs more of them to keep its sender busy.

    Example:
        >>> [near_windows(channels) for channels in (1, 2, 100)]
        [2, 1, 1]
    """
    return max(1, _NEAR_WINDOWS_OF_ALL // max(1, channels))


def far_windows(channels: int) -> int:
    """How many windows each channel has that comes through gateways, of so many of one gate.

    What is under way there passes two more processes, each of which has to be given a processor, so it takes more of it
    to keep a sender busy; many channels keep one another busy.

    Example:
        >>> [far_windows(channels) for channels in (1, 4, 5, 32, 100)]
        [8, 8, 6, 1, 1]
    """
    return max(1, min(_FAR_WINDOWS, _FAR_WINDOWS_OF_ALL // max(1, channels)))


def half_window(window_bytes: int) -> int:
    """The share of the window that decides on overdraft and on giving credit back."""
    return max(1, window_bytes // 2)


class SenderCredit:
    """What the producing end may still send on one channel.

    Example: a window of 1000 bytes; the second batch may overdraw, the third waits for credit.
        >>> credit = SenderCredit(1000)
        >>> credit.spend(400)
        >>> credit.spend(900)  # 600 are available, which is more than half of the window
        >>> credit.available, credit.may_send(1)
        (-300, False)
        >>> credit.grant(1300)
        >>> credit.available
        1000
    """

    __slots__ = ("_half", "available", "window")

    def __init__(self, window_bytes: int) -> None:
        if window_bytes <= 0:
            raise CreditError(f"a credit window of {window_bytes} bytes; it must be positive")
        self.window = window_bytes
        self.available = window_bytes
        self._half = half_window(window_bytes)

    def may_send(self, charge_bytes: int) -> bool:
        """True when a batch of this charge may go now."""
        return self.available >= charge_bytes or self.available >= self._half

    def spend(self, charge_bytes: int) -> None:
        """Records that a batch has gone; ``may_send`` was true."""
        assert self.may_send(charge_bytes), "a batch was sent without credit"
        self.available -= charge_bytes

    def grant(self, returned_bytes: int) -> None:
        """Takes credit that the receiver gives back.

        Raises:
            CreditError: it gives back more than it was sent.
        """
        if returned_bytes <= 0 or self.available + returned_bytes > self.window:
            raise CreditError(
                f"the receiver returns {returned_bytes} bytes of credit while"
                f" {self.window - self.available} of {self.window} are out"
            )
        self.available += returned_bytes


class ReceiverCredit:
    """What the consuming end holds and owes on one channel.

    Example: credit goes back once the task has taken half of the window.
        >>> credit = ReceiverCredit(1000)
        >>> credit.received(300), credit.received(300)
        (None, None)
        >>> credit.taken(300), credit.taken(300)
        (0, 600)
    """

    __slots__ = ("_half", "_owed", "_unreturned", "window")

    def __init__(self, window_bytes: int) -> None:
        if window_bytes <= 0:
            raise CreditError(f"a credit window of {window_bytes} bytes; it must be positive")
        self.window = window_bytes
        self._half = half_window(window_bytes)
        self._unreturned = 0  # received, credit not given back yet
        self._owed = 0  # the part of it that the task has already taken

    @property
    def held_bytes(self) -> int:
        """Charge of the batches received and not yet taken."""
        return self._unreturned - self._owed

    def received(self, charge_bytes: int) -> None:
        """A batch has arrived.

        Raises:
            CreditError: the sender had no credit for it.
        """
        free = self.window - self._unreturned
        if free < charge_bytes and free < self._half:
            raise CreditError(
                f"a batch of {charge_bytes} bytes came while {free} of {self.window} were free"
            )
        self._unreturned += charge_bytes

    def taken(self, charge_bytes: int) -> int:
        """The task has taken a batch; returns the credit to give back now, 0 for none yet."""
        self._owed += charge_bytes
        assert self._owed <= self._unreturned, "more was taken than received"
        if self._owed < self._half:
            return 0
        returned, self._owed = self._owed, 0
        self._unreturned -= returned
        return returned
