"""Texts from elsewhere as a terminal may show them: names, addresses, messages, values of rows."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"


def printable(text: str) -> str:
    r"""The text with every character written out that would move the cursor, colour or re-order what stands there.

    Line ends and tabs stay. For example ``printable("\x1b[2Jx") == "\\x1b[2Jx"``.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in _KEPT or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def in_one_line(text: str) -> str:
    """The same where a line end or a tab would pretend to be a line, or a column, of ours."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")
