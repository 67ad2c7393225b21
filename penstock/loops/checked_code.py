"""Files of numba's machine code with checksums: damaged code is not loaded, which would end the process.

What is unpickled ends before the checksum, so numba reads such files as well. It is imported where numba is.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

from numba.core import sigutils, typeinfer
from numba.core.caching import IndexDataCacheFile
from numba.core.decorators import njit
from typing_extensions import override

_DIGEST_SIZE = 32


class DamagedCode(Exception):  # noqa: N818 - it is compiled anew
    """A file is not what was written."""


class _CheckedFiles(IndexDataCacheFile):  # type: ignore[misc]
    def __init__(self, impl: Any) -> None:
        locator = impl.locator
        super().__init__(locator.get_cache_path(), impl.filename_base, locator.get_source_stamp())
        self._version += " with checksums"

    @override
    def _dump(self, obj: Any) -> bytes:
        data: bytes = super()._dump(obj)
        return data + _digest(data)

    @override
    def _load_index(self) -> Any:
        try:
            with Path(self._index_path).open("rb") as file:
                if pickle.load(file) == self._version:
                    _check(file.read(), self._index_name)
        except FileNotFoundError:
            return {}
        return super()._load_index()

    @override
    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        _check(data, name)
        return pickle.loads(data)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _check(data: bytes, name: str) -> None:
    if _digest(data[:-_DIGEST_SIZE]) != data[-_DIGEST_SIZE:]:
        raise DamagedCode(f"{name} is not what was written")


def kept_function(function: Any, options: dict[str, Any]) -> Any:
    """A function whose machine code is kept in files with checksums, not compiled yet."""
    kept = njit(cache=True, **options)(function)
    kept._cache._cache_file = _CheckedFiles(kept._cache._impl)
    return kept


def compile_for(kept: Any, signature: Any) -> Any:
    """Compiles or loads it for a signature, or several, and for no others later, as ``njit(signature)`` does."""
    signatures = [signature] if sigutils.is_signature(signature) else signature
    with typeinfer.register_dispatcher(kept):
        for each in signatures:
            kept.compile(each)
        kept.disable_compile()
    return kept
