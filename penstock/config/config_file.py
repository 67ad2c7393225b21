"""Keys and values as they are given, nested or with points: each is there once.

>>> flat_keys({"heartbeat": {"interval": "1 s"}, "parallelism.default": 4})
{'heartbeat.interval': '1 s', 'parallelism.default': 4}
>>> flat_keys({"heartbeat": {"interval": "1 s"}, "heartbeat.interval": "2 s"})
Traceback (most recent call last):
    ...
penstock.errors.ConfigurationError: 'heartbeat.interval' is there twice: leave one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from penstock.errors import ConfigurationError


def flat_keys(values: Mapping[str, object]) -> dict[str, object]:
    """The values by key, whose parts have points between them.

    Raises:
        ConfigurationError: a key is there twice.
    """
    flat: dict[str, object] = {}
    for key, value in _flatten("", values):
        if key in flat:
            raise ConfigurationError(f"{key!r} is there twice: leave one")
        flat[key] = value
    return flat


def read_yaml(path: Path) -> dict[str, object]:
    """The flat keys of a YAML file; none where there is no such file.

    Raises:
        ConfigurationError: the file cannot be read, is not a mapping or has a key twice.
    """
    try:
        text = path.read_text()
        tree, content = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        # What these say quotes the file, which may hold secrets: so does the chain of causes.
        raise ConfigurationError(f"cannot read {path}: it is no YAML{_place_of(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must hold keys and values, not {type(content).__name__}")
    try:
        _check_once(tree)
        return flat_keys(content)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: an alias stands for what it lies in") from None


def _check_once(node: yaml.Node | None) -> None:
    """YAML itself takes the last value of a key, and with it all that lies below it."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            before = seen[key.value]
            raise ConfigurationError(
                f"{key.value!r} is there twice, in lines {before} and {line}: leave one"
            )
        seen[key.value] = line
        _check_once(value)


def _flatten(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _place_of(error: Exception) -> str:
    """Where a file is no YAML and why, without a word of what is in it."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    mark = error.problem_mark
    return f" (line {mark.line + 1}, column {mark.column + 1})"
