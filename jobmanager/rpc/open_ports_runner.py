"""The ports of a JobManager: open from its start to its end, whoever answers there.

Invariant: a JobManager that stands by and then leads is never refused at a port meanwhile, since each port is bound once.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from common.auth import load_token, require_token
from common.daemon_server import DaemonServer
from common.keyring_runner import refreshed
from common.metrics_server import METRICS_OFF, MetricsServer, Pages
from common.tls.daemon_tls_runner import DaemonTls
from jobmanager.rpc.bound_port_runner import bind
from penstock.client.addresses import format_address
from penstock.client.credentials import make_own_token
from penstock.client.keyring import Keyring, Token, keyring_of
from penstock.config import Configuration


class OpenPorts:
    """See the module. Nobody is answered before somebody is to answer: ``server`` is started, ``show`` called.

    Args:
        config: of the cluster.
        made_token_file: holds the token that this JobManager has made for its user, None where it was given one.

    Raises:
        StreamError: a port is not to be had.
    """

    def __init__(
        self,
        config: Configuration,
        token: Token,
        made_token_file: Path | None = None,
        tls: DaemonTls | None = None,
    ) -> None:
        self.keyring = keyring_of(token)
        self.made_token_file = made_token_file
        self.server = DaemonServer(
            self.keyring,
            tls,
            takes_clients=True,
            clients_need_tls=config.security_ssl_client_enabled,
        )
        self._config = config
        self._refreshing = ExitStack()
        self._metrics: MetricsServer | None = None
        self._metrics_port = METRICS_OFF
        self.port = bind(self.server, config.jobmanager_bind_host, config.jobmanager_rpc_port)
        self._refreshing.enter_context(refreshed(self.keyring))

    @property
    def address(self) -> str:
        """Under which this JobManager is reached."""
        return format_address(self._config.jobmanager_rpc_address, self.port)

    @property
    def metrics_address(self) -> str:
        """Of Prometheus' endpoint, "" where there is none."""
        if self._metrics_port == METRICS_OFF:
            return ""
        return format_address(self._config.jobmanager_rpc_address, self._metrics_port)

    def show(self, pages: Pages) -> None:
        """Metrics and health are these from now on.

        Raises:
            ConfigurationError: the port is not to be had.
        """
        if self._metrics is not None:
            self._metrics.pages = pages
            return
        self._metrics = MetricsServer(
            pages,
            self._config.jobmanager_bind_host,
            self._config.jobmanager_metrics_port,
            "jobmanager.metrics.port",
        )
        self._metrics_port = self._metrics.start()

    async def close(self) -> None:
        """Nobody is answered any more."""
        self._refreshing.close()
        await self.server.stop(None)
        if self._metrics is not None:
            self._metrics.stop()


async def open_ports(
    config: Configuration, directory: Path, tls: DaemonTls | None = None
) -> OpenPorts:
    """Opens them, under the token that the JobManager was given, or else makes.

    Args:
        config: of the cluster.

    Raises:
        StreamError: a port or a token is not to be had.
    """
    token, made_token_file = await asyncio.to_thread(_own_token, config, directory)
    return OpenPorts(config, token, made_token_file, tls)


def _own_token(config: Configuration, directory: Path) -> tuple[Keyring, Path | None]:
    """The token of a JobManager, and the file with it where the JobManager has made it for its user.

    Raises:
        ConfigurationError: it needs one from its user, or it cannot be read or written.
    """
    token = load_token(config.security_token_file)
    require_token(
        config.jobmanager_bind_host,
        token,
        "jobmanager.bind-host",
        has_tls=config.security_ssl_internal_enabled,
    )
    if token or config.security_open_loopback:
        return token, None
    made = make_own_token(directory)
    return load_token(str(made)), made
