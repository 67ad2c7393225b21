"""``strptime``: texts as times by a format, where a day that its month or its year does not have is none, nor a second 60 or a zone a
day away.

Arrow goes on counting from there: February 30 is March 1 to it, and 10:00:60 is 10:01:00.
"""

from __future__ import annotations

import re
from calendar import isleap, monthrange
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_SHORT_FORMS = {
    "F": "%Y-%m-%d",
    "D": "%m/%d/%y",
    "x": "%m/%d/%y",
    "T": "%H:%M:%S",
    "X": "%H:%M:%S",
    "R": "%H:%M",
    "r": "%I:%M:%S %p",
    "c": "%a %b %e %H:%M:%S %Y",
}
_SAME = {"e": "d", "h": "b", "B": "b"}
_TOKENS = {
    "Y": r"\s*\d{1,4}",
    **dict.fromkeys(("C", "y", "m", "d", "H", "I", "M", "S"), r"\s*\d{1,2}"),
    "j": r"\s*\d{1,3}",
    **dict.fromkeys(("a", "A", "b"), r"[^\W\d_]+"),
    "z": r"\s*(?:Z|[+-]\d\d(?::?\d\d)?)",
    **dict.fromkeys(("n", "t"), r"\s*"),
    "%": "%",
}
_BEHIND_OF_30_DAYS = pa.array([5, 7, 10, 12], pa.int64())
_DAYS_OF_ALL = {"d": 28, "j": 365}
"""Directives of days, and how many every month or year has."""
_CHECKED = {*_DAYS_OF_ALL, "S", "z"}
_FAR_ZONE = r"[+-](2[4-9]|[3-9]\d)"
"""What is in texts of zones that are a day away or more."""
_YEAR_WITHOUT_ONE = 1900


def strptime_kernel(
    parse: Callable[..., Any], options: Any, given: Mapping[str, Any]
) -> Callable[[list[Any]], Any]:
    """How texts become times.

    Args:
        parse: the function of pyarrow.compute.
        options: as that wants them.
        given: the same by name.
    """
    pattern = _pattern(given["format"])
    if not any(directive in pattern.groupindex for directive in _CHECKED):
        return lambda args: parse(args, options)

    def times_of(args: list[Any]) -> Any:
        if isinstance(args[0], pa.Scalar):
            return times_of([pa.array([args[0].as_py()], args[0].type)])[0]
        texts, times = args[0], parse(args, options)
        suspects = np.flatnonzero(_may_be_counted_on(texts, times, pattern))
        if len(suspects):
            suspects = suspects[_may_be_none(texts.take(pa.array(suspects)), pattern)]
        if not len(suspects):
            return times
        suspected = texts.take(pa.array(suspects)).to_pylist()
        wrong = suspects[[_is_none(pattern, text) for text in suspected]]
        if not len(wrong):
            return times
        if not given.get("error_is_null"):
            raise pa.ArrowInvalid(f"there is no day or time {texts[int(wrong[0])].as_py()!r}")
        mask = np.zeros(len(times), np.bool_)
        mask[wrong] = True
        return pc.if_else(pa.array(mask), pa.scalar(None, times.type), times)

    return times_of


def _pattern(format_: str) -> re.Pattern[str]:
    """Which parts of a text the directives of a format read.

    >>> _pattern("%F %H").fullmatch("2024-02-30 7")["d"]
    '30'
    """
    format_ = re.sub(r"%[EO](?=\w)", "%", format_)
    format_ = re.sub(r"%.", lambda found: _SHORT_FORMS.get(found[0][1:], found[0]), format_)
    parts: list[str] = []
    named: set[str] = set()
    for piece in reversed(re.findall(r"%.|\s+|[^%\s]", format_, re.DOTALL)):
        if not piece.startswith("%"):
            parts.append(r"\s*" if piece.isspace() else re.escape(piece))
            continue
        directive = _SAME.get(piece[1:], piece[1:])
        token = _TOKENS.get(directive, ".*?")
        is_last = directive.isalpha() and directive not in named  # of several the last counts
        named.add(directive)
        parts.append(f"(?P<{directive}>{token})" if is_last else f"(?:{token})")
    return re.compile("".join(reversed(parts)), re.DOTALL)


def _may_be_counted_on(texts: Any, times: Any, pattern: re.Pattern[str]) -> Any:
    """Which times may be ones that were counted on to."""
    found = pa.repeat(pa.scalar(False), len(times))
    if "j" in pattern.groupindex:
        found = pc.is_valid(times)
    elif "d" in pattern.groupindex:
        found = _is_behind_short_month(times)
        if (
            "z" in pattern.groupindex
        ):  # the times are in UTC, and so up to a day beside what was read
            day = pa.scalar(86_400, pa.duration("s"))
            for beside in (pc.add(times, day), pc.subtract(times, day)):
                found = pc.or_(found, _is_behind_short_month(beside))
    if "S" in pattern.groupindex:
        is_full = pc.match_substring_regex(texts, "6[01]")
        found = pc.or_(found, pc.and_(is_full, pc.less(pc.second(times), 2)))
    if "z" in pattern.groupindex:
        found = pc.or_(found, pc.match_substring_regex(texts, _FAR_ZONE))
    return pc.fill_null(found, False).to_numpy(zero_copy_only=False)


def _may_be_none(texts: Any, pattern: re.Pattern[str]) -> Any:
    """In which texts a day or a second is a number that there may not be, or cannot be told by Arrow's expressions."""
    if not pa.types.is_string(texts.type):
        texts = texts.cast(pa.string())
    read = pc.extract_regex(texts, f"^(?s:{pattern.pattern})$")
    found = pc.is_null(read)
    has_numbered_month = "m" in pattern.groupindex and "b" not in pattern.groupindex
    for directive, days in _DAYS_OF_ALL.items():
        if directive in pattern.groupindex:
            is_of_month = directive == "d" and has_numbered_month
            limit = _days_of_month(read) if is_of_month else days
            found = pc.or_(found, pc.greater(_number(read, directive), limit))
    if "S" in pattern.groupindex:
        found = pc.or_(found, pc.greater(_number(read, "S"), 59))
    if "z" in pattern.groupindex:
        zones = pc.utf8_trim_whitespace(pc.struct_field(read, "z"))
        found = pc.or_kleene(found, pc.match_substring_regex(zones, f"^{_FAR_ZONE}"))
    return pc.fill_null(found, False).to_numpy(zero_copy_only=False)


def _days_of_month(read: Any) -> Any:
    """How many days the month has in every year."""
    month = _number(read, "m")
    is_short = pc.is_in(pc.add(month, 1), _BEHIND_OF_30_DAYS)
    return pc.if_else(pc.equal(month, 2), 28, pc.if_else(is_short, 30, 31))


def _number(read: Any, directive: str) -> Any:
    """What a directive has read, 0 where the text is not read."""
    token = pc.utf8_trim_whitespace(pc.struct_field(read, directive))
    return pc.cast(pc.if_else(pc.is_valid(read), token, "0"), pa.int64())


def _is_behind_short_month(times: Any) -> Any:
    month, day = pc.month(times), pc.day(times)
    behind_february = pc.and_(pc.equal(month, 3), pc.less_equal(day, 3))
    behind_others = pc.and_(pc.equal(day, 1), pc.is_in(month, _BEHIND_OF_30_DAYS))
    return pc.or_(behind_february, behind_others)


def _is_none(pattern: re.Pattern[str], text: str) -> bool:
    found = pattern.fullmatch(text)
    if found is None:
        return False
    tokens = {name: token.strip() for name, token in found.groupdict().items()}
    year, month = _year(tokens), int(tokens.get("m", 1))
    name = tokens.get("b", "")[:3].lower()
    if name in _MONTHS:
        month = 1 + _MONTHS.index(name)
    of_year = int(tokens.get("j", 1))
    is_no_day = int(tokens.get("d", 1)) > monthrange(year, month)[1] or of_year > 365 + isleap(year)
    is_far = re.match(_FAR_ZONE, tokens.get("z", "")) is not None
    return is_no_day or is_far or int(tokens.get("S", 0)) > 59


def _year(tokens: Mapping[str, str]) -> int:
    if "Y" in tokens:
        return int(tokens["Y"])
    if "C" in tokens:
        return 100 * int(tokens["C"]) + int(tokens.get("y", 0))
    if "y" in tokens:
        short = int(tokens["y"])
        return short + (1900 if short >= 69 else 2000)
    return _YEAR_WITHOUT_ONE
