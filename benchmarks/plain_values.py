"""Plain Python values into the bytes that state keeps and back, beside pickle: ``python -m benchmarks.plain_values``.

CPU microseconds per value, the best of seven rounds, and bytes; ``pickle`` is the codec of a state declared with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import click

from penstock.storage.codec import codec_of

_ROUNDS: Final = 7
_VALUES: Final[dict[str, Any]] = {
    "record": {"count": 5, "sum": 12.5},
    "tuple of 3": (1, 2.5, "x"),
    "list of 10 ints": list(range(0, 100_000, 10_000)),
    "list of 20 floats": [place * 1.37 for place in range(20)],
    "list of 40 tuples": [(place, place * 1.37, "abc") for place in range(40)],
    "dict of 10 texts": {f"k{place}": f"value {place}" for place in range(10)},
    "dict of 10 floats": {f"k{place}": place * 1.37 for place in range(10)},
    "dict of 10 tuples": {f"k{place}": (place, place * 1.37) for place in range(10)},
    "dict of 10 lists": {f"k{place}": [place, place * 1.37] for place in range(10)},
    "nested": {"a": [(1, [2, (3, "x")]), (4, [])], "b": {"c": (1, 2), "d": [1.5, None, True]}},
}


def _microseconds(call: Callable[[Any], Any], value: Any, times: int) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.process_time()
        for _ in range(times):
            call(value)
        best = min(best, time.process_time() - began)
    return best / times * 1e6


@click.command()
@click.option("--times", type=click.IntRange(1), default=3000, show_default=True)
def main(times: int) -> None:
    """Measure values of ten shapes."""
    codecs = codec_of("msgpack/1"), codec_of("pickle/1")
    click.echo(f"{'':20}{'write':>7}{'pickle':>8}{'read':>7}{'pickle':>8}{'bytes':>7}{'pickle':>8}")
    for name, value in _VALUES.items():
        stored = [codec.to_stored(value) for codec in codecs]
        writes = [_microseconds(codec.to_stored, value, times) for codec in codecs]
        reads = [
            _microseconds(codec.to_value, data, times)
            for codec, data in zip(codecs, stored, strict=True)
        ]
        figures = "".join(f"{own:7.2f}{other:8.2f}" for own, other in (writes, reads))
        click.echo(f"{name:20}{figures}{len(stored[0]):7}{len(stored[1]):8}")


if __name__ == "__main__":
    main()
