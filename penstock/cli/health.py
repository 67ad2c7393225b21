"""``penstock health``: whether one daemon serves, for whoever starts it again or waits for it."""

from __future__ import annotations

import click

from penstock.cli.context import EXIT_FAILED, echo, print_json, reports_errors
from penstock.client.addresses import format_address, parse_address
from penstock.errors import JobManagerUnreachable

_TIMEOUT_S = 3.0


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with stable fields.")
@reports_errors
def health(address: str, as_json: bool) -> None:
    """Ask the daemon whose metrics are served at HOST:PORT whether it serves.

    A JobManager does when it leads, or stands by and knows who leads; a TaskManager when a JobManager has
    it registered. The exit status is 0 then, 1 where it does not and says why, 3 where nothing answers.
    """
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, build_opener

    url = f"http://{format_address(*parse_address(address))}/health"
    # Never by a proxy: what it answers says nothing about the daemon.
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer:
            serves, told = True, answer.read(4096).decode(errors="replace").strip()
    except HTTPError as error:
        serves, told = False, error.read(4096).decode(errors="replace").strip()
    except OSError as error:
        raise JobManagerUnreachable(
            f"no daemon answers at {url}: {error}; `penstock cluster status` shows the metrics addresses of a "
            "local cluster"
        ) from error
    if as_json:
        print_json({"address": address, "serves": serves, "status": told})
    else:
        echo(told)
    if not serves:
        raise SystemExit(EXIT_FAILED)
