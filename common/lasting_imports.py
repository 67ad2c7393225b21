"""What a daemon imports lives as long as it does: no garbage collection has to look at it.

Collections on the way and at the end of the process would take a quarter of the CPU time in which a daemon
starts and ends.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Nothing is collected in the block, and what is there at its end never is.

    >>> import gc
    >>> with lasting_imports():
    ...     import string
    >>> gc.isenabled(), gc.get_freeze_count() > 0
    (True, True)
    >>> gc.unfreeze()
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
