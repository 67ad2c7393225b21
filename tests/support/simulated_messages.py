"""The messages of a simulation in a few words, for its story."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from google.protobuf.message import Message

from common.pb import internal_pb2
from penstock.pb import client_pb2

_OFTEN = {"Heartbeat", "PushResults"}
"""Calls that would fill a story without telling anything."""


def call_words(name: str, request: Message) -> list[str]:
    """What a call between daemons says; nothing where that is not worth a line."""
    match request:
        case internal_pb2.ReportTaskEventsRequest():
            return _grouped(event_words(event) for event in request.events)
        case internal_pb2.SendTaskCommandsRequest():
            return _grouped(command_words(command) for command in request.commands)
        case internal_pb2.DeployTasksRequest():
            return [f"deploy {_subtasks(task.attempt for task in request.tasks)}"]
        case internal_pb2.AllocateSlotsRequest() | internal_pb2.FreeSlotsRequest():
            verb = "allocate" if isinstance(request, internal_pb2.AllocateSlotsRequest) else "free"
            return [f"{verb} {' '.join(request.slot_ids)}"]
        case _:
            words = re.sub("(?<=[a-z])([A-Z])", r" \1", name.replace("TaskManager", "Taskmanager"))
            return [] if name in _OFTEN else [words.lower()]


def event_words(event: internal_pb2.TaskEvent) -> tuple[str, str]:
    """What a subtask tells, and which."""
    kind = event.WhichOneof("event") or ""
    match kind:
        case "state_changed":
            state = client_pb2.AttemptState.Name(event.state_changed.state)
            told = state.removeprefix("ATTEMPT_STATE_")
            failure = event.state_changed.failure
            told += f": {failure.message}" if event.state_changed.HasField("failure") else ""
        case "checkpoint_acknowledged":
            told = f"acks {event.checkpoint_acknowledged.checkpoint_id}"
        case "checkpoint_declined":
            declined = event.checkpoint_declined
            told = f"declines {declined.checkpoint_id}: {declined.reason}"
        case "checkpoint_committed":
            told = f"has committed {event.checkpoint_committed.checkpoint_id}"
        case _:
            told = kind.replace("_", " ")
    return told, attempt_name(event.attempt)


def command_words(command: internal_pb2.TaskCommand) -> tuple[str, str]:
    """What a subtask is told, and which."""
    kind = command.WhichOneof("command") or ""
    about = getattr(command, kind)
    number = getattr(about, "checkpoint_id", None)
    told = " ".join(word for word in kind.split("_") if word != "checkpoint")
    told += "" if number is None else f" {number}"
    return told, attempt_name(command.attempt)


def slot_command_words(command: internal_pb2.SlotCommand) -> list[str]:
    """What a slot process is told."""
    match command.WhichOneof("command"):
        case "deploy":
            deployed = command.deploy
            restored = deployed.restore.checkpoint_id
            what = f" from checkpoint {restored}" if restored else ""
            return [f"deploy {attempt_name(deployed.attempt)}{what}"]
        case "task_command":
            return _grouped([command_words(command.task_command)])
        case "shutdown":
            return ["shutdown"]
        case _:
            return []


def attempt_name(attempt: internal_pb2.AttemptId) -> str:
    """Vertex, subtask, and which execution of it."""
    return f"{attempt.vertex}/{attempt.subtask_index}#{attempt.attempt}"


def _subtasks(attempts: Iterable[internal_pb2.AttemptId]) -> str:
    return " ".join(attempt_name(attempt) for attempt in attempts)


def _grouped(words: Iterable[tuple[str, str]]) -> list[str]:
    """The same of several subtasks is said once."""
    return [
        f"{' '.join(name for _, name in named)} {told}"
        for told, named in itertools.groupby(words, key=lambda one: one[0])
    ]
