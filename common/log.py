"""Structured logs of the daemons.

One event is one line: JSON in the daemon's log file, and on stdout JSON again, or readable text
when stdout is a terminal. Events are ``noun.past_verb``; ids are bound once with
``structlog.contextvars.bind_contextvars`` or ``logger.bind``. Records of the standard ``logging``
module (asyncio, grpc) come out the same way.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from penstock.errors import ConfigurationError
from penstock.printable import printable

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_OTHERS = ("boto3", "botocore", "kazoo", "s3transfer", "urllib3")
"""Libraries that write whole requests, and with them passwords and keys, where one asks for details."""


def configure_logging(role: str, log_file: Path | None, level: str) -> None:
    """Sets up logging for this process; a later call replaces an earlier one.

    Args:
        role: written into every line, "jobmanager" or "taskmanager".
        log_file: gets JSON lines, appended; its directory is made. None = stdout only.
        level: "DEBUG" | "INFO" | "WARNING" | "ERROR" | "CRITICAL", in any case.

    Raises:
        ConfigurationError: the level is unknown or the file cannot be opened.
    """
    if level.upper() not in LEVELS:
        raise ConfigurationError(f"log level {level!r} is unknown: use one of {', '.join(LEVELS)}")
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _RoleAdder(role),
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.StackInfoRenderer(),
    ]
    json_lines: list[Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(default=str),
    ]
    console: list[Processor] = [_made_printable, structlog.dev.ConsoleRenderer(colors=True)]
    stdout = logging.StreamHandler(sys.stdout)
    stdout.setFormatter(_formatter(shared, console if sys.stdout.isatty() else json_lines))
    handlers: list[logging.Handler] = [stdout]
    if log_file is not None:
        handlers.append(_file_handler(log_file, _formatter(shared, json_lines)))

    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _OTHERS:
        logging.getLogger(name).setLevel(max(root.level, logging.INFO))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def configure_slot_logging(level: str) -> None:
    """Leaves out what is below a level, in a process that prints readable text to what its daemon has given it."""
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(number))


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module; may be made before ``configure_logging`` is called."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def _formatter(
    shared: list[Processor], renderers: list[Processor]
) -> structlog.stdlib.ProcessorFormatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    )


def _file_handler(log_file: Path, formatter: logging.Formatter) -> logging.Handler:
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_file, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"the log file {log_file} cannot be opened: {error}") from error
    handler.setFormatter(formatter)
    return handler


def _made_printable(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Names of jobs and messages of others do nothing to the terminal; JSON escapes them by itself."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(value)
    return event


class _RoleAdder:
    """Writes the daemon's role into every event."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __call__(self, _logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
        event.setdefault("role", self._role)
        return event
