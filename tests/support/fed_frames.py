"""Frames of bytes that lie in memory, where slots receive into what the decoder offers."""

from __future__ import annotations

from taskmanager.network.frames import Frame, FrameDecoder


def fed(decoder: FrameDecoder, data: bytes | memoryview) -> list[Frame]:
    """What these bytes complete."""
    frames: list[Frame] = []
    source = memoryview(data)
    while source:
        target = decoder.targets()[0]
        part = min(len(target), len(source))
        target[:part] = source[:part]
        source = source[part:]
        frames.extend(decoder.received(part))
    return frames
