"""The examples of docs/testing.md run as they stand there, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "testing.md"


def test_the_examples_of_the_page_run() -> None:
    text = PAGE.read_text()
    namespace: dict[str, Any] = {"__name__": "docs_testing"}
    found = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    for match in found:
        line = text.count("\n", 0, match.start(1))
        exec(compile("\n" * line + match[1], str(PAGE), "exec"), namespace)
    assert len(found) >= 4
