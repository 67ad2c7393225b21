"""The cluster of a script that names none."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from penstock.client.client import Client
from penstock.client.protocol import EMBEDDED_MARKER, PARENT_DEATH_VARIABLE
from penstock.config import Configuration
from penstock.local.local_cluster import LocalCluster


class EmbeddedCluster:
    """A cluster of child processes for one client; it ends with the client, whatever ends that."""

    def __init__(self, config: Configuration, slots: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-"))
        (self._directory / EMBEDDED_MARKER).touch()
        self._cluster = LocalCluster(self._directory)
        overrides = {
            **config.to_mapping(),
            "jobmanager.rpc.address": "127.0.0.1",
            "jobmanager.bind-host": "127.0.0.1",
            "jobmanager.rpc.port": "0",
            "jobmanager.metrics.port": "-1",
            "taskmanager.metrics.port": "-1",
            "taskmanager.print-to-terminal": "true",
        }
        terminal = _open_terminal()
        try:
            self._cluster.start(
                taskmanagers=1,
                slots=slots,
                overrides=overrides,
                environment={
                    PARENT_DEATH_VARIABLE: "1",
                    "PENSTOCK_TERMINAL_FD": str(terminal),
                },
                pass_descriptors=(terminal,),
            )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(terminal)

    @property
    def address(self) -> str:
        """Where its JobManager is."""
        return self._cluster.address

    def client(self) -> Client:
        """A client of it."""
        return self._cluster.client()

    def close(self) -> None:
        """Ends the daemons and removes their directory."""
        self._cluster.stop()
        shutil.rmtree(self._directory, ignore_errors=True)


def _open_terminal() -> int:
    """A descriptor of what this process prints to; of nothing where its stdout is closed."""
    if sys.__stdout__ is not None:
        with contextlib.suppress(OSError):
            return os.dup(1)
    # Descriptor 1 may be anything that was opened since.
    return os.open(os.devnull, os.O_WRONLY)
