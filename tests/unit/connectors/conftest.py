"""What the connector tests share."""

from __future__ import annotations

import pytest

from tests.support.source_harness import SourceHarness

SMALL_BLOCK = 96


@pytest.fixture
def harness() -> SourceHarness:
    return SourceHarness()


@pytest.fixture
def skipping() -> SourceHarness:
    return SourceHarness(skip_bad=True)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is read in tiny blocks, so that small files have many block borders."""
    from taskmanager.connectors import text_blocks

    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr(text_blocks, "SALVAGE_BYTES", SMALL_BLOCK // 2)
