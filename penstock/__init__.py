"""Penstock: a fault-tolerant stateful stream processor for Python, columnar on Arrow.

This package is all that user code imports: ``import penstock as ps``. What it names is loaded when the first name is
asked for: daemons and the command line use modules of this package, but none of the names, and start without them.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.client.own_modules import set_apart_beside_script

if TYPE_CHECKING:
    from penstock.api import *  # noqa: F403 - its __all__ says which

__version__ = "0.1.0"

set_apart_beside_script()  # before the script imports its own modules


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f"penstock.{name}") is not None:
        return importlib.import_module(f"penstock.{name}")
    api = importlib.import_module("penstock.api")
    globals().update({public: getattr(api, public) for public in api.__all__}, __all__=api.__all__)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("penstock.api").__all__})
