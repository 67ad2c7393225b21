"""Credit: both ends under any interleaving stay within bounds and never stop each other for good."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmanager.network.credit import (
    CreditError,
    ReceiverCredit,
    SenderCredit,
    charge_of,
    half_window,
)


@given(
    st.integers(1, 5000),
    st.lists(st.integers(1, 12_000), min_size=1, max_size=40),
    st.lists(st.sampled_from(["send", "arrive", "take", "grant"]), max_size=200),
)
def test_any_interleaving_is_bounded_and_ends(
    window: int, charges: list[int], steps: list[str]
) -> None:
    sender, receiver = SenderCredit(window), ReceiverCredit(window)
    to_send = deque(charges)
    wire: deque[int] = deque()
    queue: deque[int] = deque()
    grants: deque[int] = deque()
    largest = max(charges)

    def step(kind: str) -> bool:
        if kind == "send" and to_send and sender.may_send(to_send[0]):
            sender.spend(to_send[0])
            wire.append(to_send.popleft())
        elif kind == "arrive" and wire:
            receiver.received(wire[0])
            queue.append(wire.popleft())
        elif kind == "take" and queue:
            if returned := receiver.taken(queue.popleft()):
                grants.append(returned)
        elif kind == "grant" and grants:
            sender.grant(grants.popleft())
        else:
            return False
        assert sender.available <= window
        assert receiver.held_bytes == sum(queue)
        assert sum(queue) + sum(wire) <= max(window, window - half_window(window) + largest)
        return True

    for kind in steps:
        step(kind)
    while sum(step(kind) for kind in ("send", "arrive", "take", "grant")):
        pass
    assert not to_send, "the pair has stopped with batches left"
    assert receiver.held_bytes == 0


def test_a_batch_larger_than_the_window_goes_when_the_channel_is_empty() -> None:
    sender = SenderCredit(1000)
    assert sender.may_send(50_000)
    sender.spend(50_000)
    assert not sender.may_send(1)


def test_credit_comes_back_for_many_batches_at_once() -> None:
    receiver = ReceiverCredit(1000)
    returned = []
    for _ in range(20):
        receiver.received(100)
        returned.append(receiver.taken(100))
    assert sum(amount > 0 for amount in returned) == 4
    assert sum(returned) == 2000


def test_violations_are_errors() -> None:
    with pytest.raises(CreditError, match="window"):
        SenderCredit(0)
    with pytest.raises(CreditError, match="window"):
        ReceiverCredit(0)
    with pytest.raises(CreditError, match="returns"):
        SenderCredit(10).grant(1)
    receiver = ReceiverCredit(1000)
    receiver.received(900)
    with pytest.raises(CreditError, match="100 of 1000"):
        receiver.received(200)


def test_tiny_batches_are_charged_for_their_overhead() -> None:
    assert charge_of(0) >= 64
