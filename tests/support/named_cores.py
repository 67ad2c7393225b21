"""The pure cores that docs/architecture.md names."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
_LINK = re.compile(r"\]\(\.\./([a-z_/]+)\.py\)")


def named_cores() -> list[str]:
    """Modules, in the order of the table."""
    text = (_ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("| decision | core | its shell |") :]
    rows = _ROW.findall(table[: table.index("\n\n")])
    return [link.replace("/", ".") for _, cores, _ in rows for link in _LINK.findall(cores)]
