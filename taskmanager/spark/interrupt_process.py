"""Ends what a session of Spark Connect has under way when its client cannot: ``python -P -m taskmanager.spark.interrupt_process``.

Its server goes on with what a client has asked for, also when that was killed. The address, which may hold a token, comes by
standard input. It ends by itself at a deadline.
"""

from __future__ import annotations

import signal
import sys

from taskmanager.spark.connect_address import INTERRUPT_S


def main() -> None:
    """Interrupts all of one session, and closes it."""
    signal.alarm(INTERRUPT_S)
    address = sys.stdin.read()
    from pyspark.sql import SparkSession

    session = SparkSession.builder.remote(address).create()
    session.interruptAll()
    session.stop()


if __name__ == "__main__":
    main()
