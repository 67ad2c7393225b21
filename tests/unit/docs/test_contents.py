"""Long pages list their contents; every page is in the index; the page of functions names all that contexts have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from penstock.connectors.sink import SinkContext
from penstock.connectors.source import SourceContext
from penstock.functions.functions import FunctionContext
from penstock.processing.process_context import ProcessContext
from penstock.processing.process_functions import PROCESS_KINDS, CheckpointContext

DOCS = Path(__file__).parents[3] / "docs"
LONG_LINES = 150
GENERATED = {"configuration.md"}
OF_THE_RUNTIME = {
    "absence",
    "apply",
    "begin",
    "end",
    "has_timers",
    "index",
    "may_write_broadcast",
    "slot",
    "slots_of",
    "split",
    "tick",
}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_long_pages_list_their_contents(page: Path) -> None:
    text = page.read_text()
    if text.count("\n") <= LONG_LINES or page.name in GENERATED | {"tutorial.md"}:
        return
    headings = [h.replace("`", "") for h in re.findall(r"^## (.+)$", text, re.MULTILINE)]
    contents = re.search(r"^Contents: (.+)$", text, re.MULTILINE)
    assert contents is not None, "a long page begins with its contents"
    assert re.findall(r"\[([^\]]+)\]\(#", contents[1]) == headings


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    missing = {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    assert {name for name in missing if f"]({name})" not in index} == set()


def test_the_page_of_functions_has_all_that_a_function_is_given() -> None:
    text = (DOCS / "functions.md").read_text()
    contexts = (FunctionContext, CheckpointContext, SinkContext, SourceContext)
    names = {field.name for context in contexts for field in dataclasses.fields(context)}
    names |= {name for name in dir(ProcessContext) if not name.startswith("_")}
    assert {n for n in names - OF_THE_RUNTIME if f"ctx.{n}" not in text} == set()
    for kind in PROCESS_KINDS:
        assert f"ps.{kind.base.__name__}" in text
        assert all(f"{method}(" in text for method in kind.methods)
