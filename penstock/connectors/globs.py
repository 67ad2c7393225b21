"""What a glob matches, whatever links there are.

The standard library's ``glob`` follows links: with two that lead back up, ``**`` has as many matches as there are
ways through forty levels. Here a link that leads to a directory which it is in ends the way. A directory that
cannot be read is an error: files in it would be missing without a word.
"""

from __future__ import annotations

import errno
import fnmatch
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_WILDCARDS = frozenset("*?[")


def has_wildcard(path: str) -> bool:
    """Whether a letter in it stands for others."""
    return not _WILDCARDS.isdisjoint(path)


def fixed_part(path: str) -> str:
    """The part of a path that is in front of wildcards.

    >>> fixed_part("/srv/in/**/*.parquet"), fixed_part("/srv/in"), fixed_part("/*")
    ('/srv/in', '/srv/in', '/')
    """
    kept = []
    for part in path.split("/"):
        if has_wildcard(part):
            break
        kept.append(part)
    return "/".join(kept) or path[:1]


def is_hidden(name: str) -> bool:
    """Whether readers skip a file or directory of this name."""
    return name.startswith(("_", "."))


def is_circle(link: str) -> bool:
    """Whether the link leads to itself or to a directory that it is in."""
    try:
        target = os.path.realpath(link, strict=True)
    except OSError as error:
        return error.errno == errno.ELOOP
    parent = os.path.realpath(Path(link).parent)
    return Path(parent).is_relative_to(target)


def glob_matches(pattern: str, on_circle: Callable[[str], None]) -> list[str]:
    """The files and directories that match, sorted; no hidden ones through a wildcard.

    Args:
        pattern: an absolute path; ``**`` stands for any number of directories.
        on_circle: told of every link that leads round in a circle.

    Raises:
        OSError: a directory cannot be read.
    """
    first, *parts = Path(pattern).parts
    told: set[str] = set()

    def is_followed(place: Path | os.DirEntry[str]) -> bool:
        if not place.is_symlink() or not is_circle(os.fspath(place)):
            return True
        if os.fspath(place) not in told:
            told.add(os.fspath(place))
            on_circle(os.fspath(place))
        return False

    fixed = next(index for index, part in enumerate(parts) if has_wildcard(part))
    places = {str(Path(first, *parts[:fixed]))}
    for index in range(fixed, len(parts)):
        is_last = index == len(parts) - 1
        places = {
            found for place in places for found in _step(place, parts[index], is_last, is_followed)
        }
    return sorted(places)


def _step(
    place: str,
    part: str,
    is_last: bool,
    is_followed: Callable[[Path | os.DirEntry[str]], bool],
) -> Iterator[str]:
    """What one part of a pattern matches in a directory; what is no directory counts as the last only."""
    if part == "**":
        yield from _below(place, is_last, is_followed)
        return
    if not has_wildcard(part):
        named = Path(place, part)
        if (named.exists() or named.is_symlink()) and is_followed(named):
            yield str(named)
        return
    for entry in _entries(place):
        matches = fnmatch.fnmatchcase(entry.name, part) and is_followed(entry)
        if matches and (is_last or entry.is_dir()):
            yield entry.path


def _below(
    place: str, with_files: bool, is_followed: Callable[[Path | os.DirEntry[str]], bool]
) -> Iterator[str]:
    """The directory and all below it."""
    pending = [place]
    while pending:
        place = pending.pop()
        yield place
        for entry in _entries(place):
            if is_followed(entry):
                if entry.is_dir():
                    pending.append(entry.path)
                elif with_files:
                    yield entry.path


def _entries(directory: str) -> list[os.DirEntry[str]]:
    """What is not hidden in a directory."""
    try:
        with os.scandir(directory) as entries:
            return [entry for entry in entries if not is_hidden(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []  # it went away, or has become a file, since it was found
