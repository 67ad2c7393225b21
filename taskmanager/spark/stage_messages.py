"""What a slot and its Spark driver say to each other: one JSON object per line."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import pyarrow as pa

from penstock.errors import StreamError
from penstock.rows.schema import schema_from_bytes, schema_to_bytes


@dataclass(frozen=True, slots=True)
class StageInput:
    """One input of a stage.

    Attributes:
        files: Parquet files that have all of its rows; at least one.
        schema: the columns in them.
    """

    files: tuple[str, ...]
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class RunStage:
    """Do a stage.

    Attributes:
        stage_id: names the attempt, within the job; tags its work in Spark.
        operator: for messages.
        function_name: how the user knows the function.
        function_file: has the function, pickled.
        inputs: none for a source, whose function takes the session.
        schema: the columns of the output as they lie in its files.
        output: directory that the stage makes.
        log_file: takes what the function prints.
        settings: of the session, where there is none yet.
        is_kept: the files of the output go where they outlive the job: they are made safe.
    """

    stage_id: str
    operator: str
    function_name: str
    function_file: str
    inputs: tuple[StageInput, ...]
    schema: pa.Schema
    output: str
    log_file: str
    settings: tuple[tuple[str, str], ...] = ()
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class CancelStage:
    """Nobody wants the stage any more."""

    stage_id: str


@dataclass(frozen=True, slots=True)
class StageBegun:
    """The session is there, and the function runs."""

    stage_id: str


@dataclass(frozen=True, slots=True)
class StageDone:
    """The output is complete."""

    stage_id: str


@dataclass(frozen=True, slots=True)
class StageFailed:
    """The stage has failed.

    Attributes:
        message: Spark's cause first.
        user_traceback: of the user's code, "" where it was not that.
        ends_driver: the process is of no use any more.
    """

    stage_id: str
    message: str
    user_traceback: str = ""
    ends_driver: bool = False


Message = RunStage | CancelStage | StageBegun | StageDone | StageFailed


def encode(message: Message) -> bytes:
    """One line.

    Example: there and back.
        >>> decode(encode(CancelStage("v1-0-2")))
        CancelStage(stage_id='v1-0-2')
    """
    match message:
        case RunStage():
            body: dict[str, Any] = {
                "stage_id": message.stage_id,
                "operator": message.operator,
                "function_name": message.function_name,
                "function_file": message.function_file,
                "inputs": [
                    {"files": list(one.files), "schema": _schema_text(one.schema)}
                    for one in message.inputs
                ],
                "schema": _schema_text(message.schema),
                "output": message.output,
                "log_file": message.log_file,
                "settings": dict(message.settings),
                "is_kept": message.is_kept,
            }
        case StageFailed():
            body = {
                "stage_id": message.stage_id,
                "message": message.message,
                "user_traceback": message.user_traceback,
                "ends_driver": message.ends_driver,
            }
        case CancelStage() | StageBegun() | StageDone():
            body = {"stage_id": message.stage_id}
        case _:
            assert_never(message)
    return json.dumps({type(message).__name__: body}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Inverse of ``encode``.

    Raises:
        StreamError: it is no message.
    """
    try:
        [(kind, body)] = json.loads(line).items()
        match kind:
            case "RunStage":
                inputs = tuple(
                    StageInput(tuple(one["files"]), _schema_of(one["schema"]))
                    for one in body.pop("inputs")
                )
                schema = _schema_of(body.pop("schema"))
                settings = tuple(body.pop("settings").items())
                return RunStage(**body, inputs=inputs, schema=schema, settings=settings)
            case "CancelStage":
                return CancelStage(**body)
            case "StageBegun":
                return StageBegun(**body)
            case "StageDone":
                return StageDone(**body)
            case "StageFailed":
                return StageFailed(**body)
            case _:
                raise StreamError(f"a message of an unknown kind: {kind}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StreamError(f"a message that is none: {line[:200]!r}: {error}") from error


@dataclass(slots=True)
class LineBuffer:
    """Cuts what comes in into lines."""

    rest: bytes = field(default=b"")

    def lines(self, data: bytes) -> Sequence[bytes]:
        """The lines that are complete now."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        return whole


def _schema_text(schema: pa.Schema) -> str:
    return base64.b64encode(schema_to_bytes(schema)).decode()


def _schema_of(text: str) -> pa.Schema:
    return schema_from_bytes(base64.b64decode(text))
