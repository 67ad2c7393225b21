"""The environment variables of the forkserver and of every slot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.client.protocol import PARENT_DEATH_VARIABLE

_ONE_THREAD = {
    # Libraries start threads when they are imported, and a process with threads cannot be forked.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


def slot_variables(inherited: Mapping[str, str], cache_directory: Path) -> dict[str, str]:
    """The environment of slots.

    Args:
        inherited: the daemon's own environment.
        cache_directory: holds compiled kernels, unless the environment names another place; it
            outlives the daemon, so that the next start finds them.
    """
    # What is for the daemon alone must not reach a cluster that user code starts.
    own = {name: value for name, value in inherited.items() if name != PARENT_DEATH_VARIABLE}
    return {
        "NUMBA_CACHE_DIR": str(cache_directory / "numba"),
        "PYTHONUNBUFFERED": "1",
        **own,
        **_ONE_THREAD,
    }
