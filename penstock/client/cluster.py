"""``ps.connect``: the jobs of a cluster that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from penstock.client.credentials import load_token
from penstock.client.job import JobHandle
from penstock.config import Configuration

if TYPE_CHECKING:
    from penstock.client.client import Client


class Cluster:
    """A cluster; made by ``ps.connect``. Close it, or use it in a ``with`` block."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def jobs(self) -> list[JobHandle]:
        """All jobs the cluster knows, running and ended, in order of submission."""
        return [JobHandle(self._client, summary.job_id) for summary in self._client.jobs()]

    def job(self, job_id: str) -> JobHandle:
        """One job; a unique beginning of its id is enough.

        Raises:
            JobNotFound: there is none, or more than one.
        """
        return JobHandle(self._client, self._client.job(job_id).summary.job_id)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(address: str, *, token_file: str = "", ca: str = "") -> Cluster:
    """A cluster by the address of its JobManager.

    Args:
        address: "host:port[,host:port...]"
        token_file: file with the cluster's secret; "" = the variable ``PENSTOCK_TOKEN``, else that of
            this user's cluster at the address.
        ca: PEM file with the CAs that are accepted for the JobManager's certificate; "" = no TLS is spoken.

    Raises:
        JobManagerUnreachable: nobody answers there.
    """
    from penstock.client.client import Client
    from penstock.client.client_tls import ClientTls

    config = Configuration.from_mapping(
        {
            "security.token-file": token_file,
            "security.ssl.client.enabled": bool(ca),
            "security.ssl.client.ca": ca,
        }
    )
    token = load_token(config.security_token_file) or None
    client = Client(address, token, tls=ClientTls.of(config))
    client.hello()
    return Cluster(client)
