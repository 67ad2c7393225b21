"""Machine code that numba keeps in files: loaded, or compiled and kept anew where they are damaged.

numba does not wait for the disk: what a power failure leaves of such a file may be empty, cut off, or lack a page.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def user_cache(name: str) -> Path:
    """A directory of this user's for what can be made again; ``NUMBA_CACHE_DIR`` goes before it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "penstock" / name


def compiled_and_kept(function: Callable[..., Any], signature: Any, **options: Any) -> Any:
    """A function compiled for a signature, or several, of numba's.

    Raises:
        numba.core.errors.NumbaError: numba does not take it.
        RuntimeError: there is no directory to keep it in ("cannot cache").
    """
    from numba.core import errors

    from penstock.loops.checked_code import compile_for, kept_function

    try:
        return compile_for(kept_function(function, options), signature)
    except errors.NumbaError:
        raise
    except Exception as error:  # unpickling and loading what is damaged fail with anything
        if "cannot cache" in str(error):
            raise
        damaged = kept_function(function, options)
        warnings.warn(
            f"what is kept of {function.__name__} in {damaged.stats.cache_path} is damaged and compiled anew: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        damaged._cache.flush()
    return compile_for(kept_function(function, options), signature)
