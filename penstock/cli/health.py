"""``penstock health``: whether one daemon serves, for whoever starts it again or waits for it."""

from __future__ import annotations

import click

from penstock.cli.context import (
    EXIT_FAILED,
    common_options,
    connected,
    echo,
    jobmanager_addresses,
    print_json,
    reports_errors,
)
from penstock.client.addresses import format_address, parse_address
from penstock.errors import JobManagerUnreachable

_TIMEOUT_S = 3.0


@click.command()
@click.argument("address", metavar="[HOST:PORT]", default="")
@common_options
@reports_errors
def health(address: str, jobmanager: str | None, as_json: bool) -> None:
    """Ask who leads, or one daemon whether it serves.

    With HOST:PORT, where its metrics are served, one daemon is asked. A JobManager serves when it leads, or stands by
    and knows who leads; a TaskManager when a JobManager has it registered. The exit status is 0 then, 1 where it
    does not and says why, 3 where nothing answers.

    Without, the JobManagers at --jobmanager are: the role is that of the one that was named, or "leader" where one of
    several leads. The exit status is 3 where nobody does.
    """
    if not address:
        _who_leads(jobmanager, as_json)
        return
    if jobmanager is not None:
        raise click.UsageError("name a daemon by HOST:PORT, or JobManagers by --jobmanager")
    serves, told = _asked(address)
    if as_json:
        print_json({"address": address, "serves": serves, "status": told})
    else:
        echo(told)
    if not serves:
        raise SystemExit(EXIT_FAILED)


def _who_leads(jobmanager: str | None, as_json: bool) -> None:
    asked = jobmanager_addresses(jobmanager).split(",")
    with connected(jobmanager, _TIMEOUT_S) as client:
        epoch = client.hello().leader_epoch
        role = "leader" if client.leader in asked else "standby"
        if as_json:
            print_json({"role": role, "leader": client.leader, "epoch": epoch})
        else:
            echo(f"{role}; {client.leader} leads, epoch {epoch}")


def _asked(address: str) -> tuple[bool, str]:
    """Whether a daemon serves, and what it says."""
    from http import HTTPStatus
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, build_opener

    url = f"http://{format_address(*parse_address(address))}/health"
    # Never by a proxy: what it answers says nothing about the daemon.
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            return True, answer.read(4096).decode(errors="replace").strip()
    except HTTPError as error:
        with error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                return False, error.read(4096).decode(errors="replace").strip()
        raise JobManagerUnreachable(
            f"what answers at {url} is no daemon of Penstock (HTTP status {error.code}): name the metrics address of one"
        ) from error
    except HTTPException as error:
        raise JobManagerUnreachable(
            f"what answers at {url} speaks no HTTP: name the metrics address of a daemon, not that of its calls "
            "(--jobmanager takes that of a JobManager)"
        ) from error
    except OSError as error:
        reason = error.reason if isinstance(error, URLError) else error
        told = getattr(reason, "strerror", None) or reason
        raise JobManagerUnreachable(
            f"no daemon answers at {url}: {told}; `penstock cluster status` shows the metrics addresses of a "
            "local cluster"
        ) from error
