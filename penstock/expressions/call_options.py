"""Options of functions as JSON, for the wire.

Values that JSON has not (sets of values, dates, decimals) are one-column Arrow streams in base64 under
the key ``"$values"`` (an array) or ``"$value"`` (one value).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from penstock.errors import ExpressionError
from penstock.expressions.literals import array_of_scalars, literal_scalar


def options_to_json(options: Mapping[str, Any]) -> str:
    """The options as a JSON object; "" = none."""
    if not options:
        return ""
    return json.dumps(options, default=_encode)


def options_from_json(text: str) -> dict[str, Any]:
    """Inverse of ``options_to_json``."""
    if not text:
        return {}
    options = json.loads(text, object_hook=_decode)
    if not isinstance(options, dict):
        raise ExpressionError(f"options of a function must be a JSON object, got {text[:100]!r}")
    return options


def array_to_bytes(array: pa.Array) -> bytes:
    """An array as an Arrow IPC stream with the one column ``value``."""
    batch = pa.RecordBatch.from_arrays([array], names=["value"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def array_from_bytes(data: bytes) -> pa.Array:
    """Inverse of ``array_to_bytes``."""
    try:
        with pa.ipc.open_stream(data) as reader:
            return reader.read_next_batch().column(0)
    except (pa.ArrowException, StopIteration, IndexError, OSError) as e:
        raise ExpressionError(f"the expression holds a value that cannot be read: {e}") from e


def _encode(value: Any) -> dict[str, str]:
    if isinstance(value, pa.Array):
        return {"$values": base64.b64encode(array_to_bytes(value)).decode()}
    scalar = literal_scalar(value)
    array = array_of_scalars([scalar], scalar.type)
    return {"$value": base64.b64encode(array_to_bytes(array)).decode()}


def _decode(value: dict[str, Any]) -> Any:
    if value.keys() == {"$values"}:
        return array_from_bytes(base64.b64decode(value["$values"]))
    if value.keys() == {"$value"}:
        scalar = array_from_bytes(base64.b64decode(value["$value"]))[0]
        return scalar if pa.types.is_temporal(scalar.type) else scalar.as_py()
    return value
