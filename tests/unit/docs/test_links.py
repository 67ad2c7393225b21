"""Every relative link in README and docs leads to a file, and to a heading where it names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors of a file's headings, as they are made by what shows Markdown."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in headings}


def links(path: Path) -> list[str]:
    found = LINK.findall(CODE.sub("", path.read_text()))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def broken(path: Path) -> list[str]:
    wrong = []
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.is_relative_to(ROOT) or not target.exists():
            wrong.append(f"{link}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{link}: there is no such heading")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    assert broken(path) == []


def test_a_broken_link_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A Page\n[a](page.md#a-page) [b](none.md) [c](#no) [d](https://example.org) `[e](x)`\n"
    )
    assert broken(page) == [
        "none.md: there is no such file",
        "#no: there is no such heading",
    ]


def test_architecture_links_the_three_stories_into_the_code() -> None:
    targets = {link for link in links(ROOT / "docs" / "architecture.md") if link.endswith(".py")}
    assert len(targets) >= 30
