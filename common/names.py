"""Ids that come from outside and become parts of file names."""

from __future__ import annotations

import re

from penstock.errors import JobRejected

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def require_name(what: str, text: str) -> str:
    """The text, when it is safe as a file name.

    Raises:
        JobRejected: it is empty, too long, or has other characters than letters, digits and ``._-``.
    """
    if _NAME.fullmatch(text) is None:
        raise JobRejected(
            f"{what} {text!r} is not usable: letters, digits, '.', '_' and '-' only, starting with "
            "a letter or digit, 200 at most"
        )
    return text
