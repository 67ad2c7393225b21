"""The configuration model: every key, its type, default and meaning, by part.

Keys follow Flink's names where the meaning is the same. A value comes from ``penstock.yaml``,
``-D key=value`` or ``Environment(config={...})``; an unknown key is an error that names the nearest
known one. ``docs/configuration.md`` is generated from this package (``make docs``).
"""

from penstock.config.config_file import read_yaml
from penstock.config.configuration import (
    SECRET_KEYS,
    Configuration,
    is_of_restart_strategy,
    known_keys,
    parse_override,
)

__all__ = [
    "SECRET_KEYS",
    "Configuration",
    "is_of_restart_strategy",
    "known_keys",
    "parse_override",
    "read_yaml",
]
