"""What all commands share: where the JobManager is, how results are printed, exit statuses."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.client.addresses import format_address, parse_addresses
from penstock.client.client import Client
from penstock.client.client_tls import ClientTls
from penstock.client.credentials import load_token
from penstock.client.shielded import shielded
from penstock.config import Configuration
from penstock.errors import ConfigurationError, JobManagerUnreachable, StreamError
from penstock.printable import in_one_line, printable

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

_CLIENT_SECURITY = ("security.token-file", "security.ssl.client.", "security.ssl.verify-hostname")

_PATIENCE_S = 5.0

Command = TypeVar("Command", bound=Callable[..., Any])
Result = TypeVar("Result")


def default_directory() -> Path:
    """Where ``penstock cluster`` keeps a cluster that was given no ``--dir``."""
    return Path(os.environ.get("PENSTOCK_DIR") or Path.home() / ".penstock")


def client_configuration() -> Configuration:
    """``./penstock.yaml``, else the default cluster's, else the defaults."""
    path = _configuration_file()
    return Configuration() if path is None else Configuration.load(path)


def _configuration_file() -> Path | None:
    default = default_directory() / "penstock.yaml"
    for path in (Path("penstock.yaml"), default):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:  # in a directory that is closed to this user
            if path is default and os.environ.get("PENSTOCK_DIR"):
                raise ConfigurationError(
                    f"PENSTOCK_DIR is set, and {path} cannot be looked at: {error.strerror}"
                ) from error
        else:
            return path
    return None


def jobmanager_addresses(option: str | None) -> str:
    """The ``--jobmanager`` option, else those of the cluster whose ``penstock.yaml`` it is, else the configured address.

    Raises:
        ConfigurationError: the option is no list of addresses.
    """
    if option is not None:
        return ",".join(parse_addresses(option))
    path = _configuration_file()
    if path is not None:
        from penstock.local.local_cluster import LocalCluster

        return LocalCluster(path.parent).address
    config = Configuration()
    return format_address(config.jobmanager_rpc_address, config.jobmanager_rpc_port)


def client_security() -> dict[str, str]:
    """What ``penstock.yaml`` says of how a client proves itself, and whom it believes.

    That of a cluster that ``penstock cluster start`` made is its daemons' as well: clients believe the CA that they do.
    """
    told = client_configuration().to_mapping()
    if ca := told.get("security.ssl.internal.ca"):
        told.setdefault("security.ssl.client.ca", ca)
    return {key: value for key, value in told.items() if key.startswith(_CLIENT_SECURITY)}


@contextlib.contextmanager
def connected(addresses: str | None, leader_timeout_s: float | None = None) -> Iterator[Client]:
    """A client of the cluster that the user means.

    Args:
        addresses: the ``--jobmanager`` option.
        leader_timeout_s: how long somebody to lead is waited for; None = as it is configured.
    """
    config = client_configuration()
    token = load_token(config.security_token_file) or None
    client = Client(
        jobmanager_addresses(addresses),
        token,
        leader_timeout_s=config.client_timeout_ms / 1000
        if leader_timeout_s is None
        else leader_timeout_s,
        tls=ClientTls.of(config),
    )
    with contextlib.closing(client):
        yield client


def common_options(command: Command) -> Command:
    """``--jobmanager`` and ``--json``."""
    command = click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document with stable fields."
    )(command)
    return click.option(
        "--jobmanager",
        metavar="HOST:PORT[,HOST:PORT]",
        help="The JobManager; default from penstock.yaml, then 127.0.0.1:6123.",
    )(command)


def reports_errors(command: Command) -> Command:
    """Turns our errors into one message on stderr and the documented exit status."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except StreamError as error:
            echo(f"penstock: {error}", err=True)
            sys.exit(exit_status(error))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read the output has enough: click's to answer
            echo(f"penstock: {error}", err=True)
            sys.exit(EXIT_FAILED)

    return run  # type: ignore[return-value]


def patiently(place: str, work: Callable[[], Result]) -> Result:
    """Does what reads or removes files, which may hang; says so after some seconds, and Ctrl-C ends it in any case.

    Args:
        place: where they are.
        work: is done by another thread.
    """

    def tell() -> None:
        echo(f"penstock: still waiting for {place}; Ctrl-C gives up", err=True)

    telling = threading.Timer(_PATIENCE_S, tell)
    telling.daemon = True
    telling.start()
    try:
        return shielded(work)
    except KeyboardInterrupt:
        echo(f"penstock: gave up on {place}", err=True)
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED)  # an ordinary end would wait for threads that hang
    finally:
        telling.cancel()


def exit_status(error: StreamError) -> int:
    """The exit status that tells a script what kind of error it was."""
    if isinstance(error, JobManagerUnreachable):
        return EXIT_UNREACHABLE
    if isinstance(error, ConfigurationError):
        return EXIT_USAGE
    return EXIT_FAILED


def echo(text: str = "", *, err: bool = False) -> None:
    """Lines for people; what others have named or written in them does nothing to the terminal."""
    click.echo(printable(text), err=err)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=2))


def print_table(columns: list[str], rows: list[list[object]]) -> None:
    """A table on stdout, as wide as it needs to be."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*[Text(in_one_line(str(cell))) for cell in row])
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)
