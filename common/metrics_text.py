"""Prometheus' text format, in which an endpoint shows what it has collected.

The client library escapes and sorts the labels of each sample anew, which is most of the time of a scrape; here samples
that share their labels, as those of a subtask do, have them written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of this format, in answers of HTTP."""

_number: Final[Callable[[float], str]] = floatToGoString


def text_of(families: Iterable[Metric]) -> str:
    """Counters and gauges as text.

    Args:
        families: with names of ASCII letters, digits and underscores; labels may be anything.
    """
    lines = []
    # By identity; the labels are kept beside their text, so that no others get their id meanwhile.
    written: dict[int, tuple[Mapping[str, str], str]] = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        help_text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {help_text}\n# TYPE {name} {family.type}\n")
        for sample in family.samples:
            labels = sample.labels
            known = written.get(id(labels))
            if known is None:
                known = written[id(labels)] = (labels, _labels_text(labels))
            lines.append(f"{sample.name}{known[1]} {_number(sample.value)}\n")
    return "".join(lines)


def _labels_text(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
