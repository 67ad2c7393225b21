"""A TaskManager daemon whose slots run ``fake_slot``; the arguments are the daemon's."""

from __future__ import annotations

import sys

from taskmanager.main import main

if __name__ == "__main__":
    sys.exit(
        main(
            sys.argv[1:],
            [
                "--entry",
                "fake_slot:run",
                "--partition-server",
                "fake_slot:serve_partitions",
                "--warm-up",
                "fake_slot:warm_up",
                "--preload",
                "",
            ],
        )
    )
