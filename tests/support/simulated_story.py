"""``python -m tests.support.simulated_story SEED JOB`` prints the story of a seed, its end and its last draw.

Two processes say the same, whatever their hashes of strings and their addresses are.
"""

from __future__ import annotations

import sys

import structlog

from tests.support.simulated_run import simulate


def main(seed: int, job: str = "") -> None:
    """Runs a seed and tells its story."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    cluster = simulate(seed, job=job)
    for moment in cluster.story:
        print(moment.at_ns, moment.process, moment.text)
    print(cluster.loop.monotonic_ns(), cluster.random.random())


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:3])
