"""What a seed tells of itself.

Aim: who reads the story of a seed finds its messages, barriers, failures and restarts, told by the process that they
concern; a seed that fails shows it, and says how to see all of it. Method: seeds of ``tests.support.simulated_run``.
"""

from __future__ import annotations

import pytest

from tests.support.simulated_run import draw_run, main, simulate, simulate_run
from tests.support.story_columns import WIDTH, draw


def test_a_seed_tells_of_messages_barriers_failures_and_restarts() -> None:
    told = draw(simulate(5).story)
    for expected in (
        "> deploy",
        "< deploy",
        "RUNNING",
        "trigger 1",
        "fault: a slot process dies",
        "dies",
        "RESTARTING",
        "barrier",
        "HEAD has",
        "FINISHED",
    ):
        assert expected in told
    assert max(map(len, told.splitlines())) <= WIDTH


def test_the_story_is_printed_for_who_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(3, 1, "hashmap", "", 50) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("seed 3\n      ms  JobManager")
    assert "moments are left out" in printed


def test_a_failed_seed_shows_its_last_moments_and_how_to_see_all() -> None:
    run = draw_run(5, "hashmap")
    run.world.breach("a row has come twice")
    with pytest.raises(AssertionError, match="a row has come twice") as caught:
        simulate_run(run, 5)
    settings, story, again = caught.value.__notes__
    assert "of seed 5" in settings
    assert story.splitlines()[0].startswith("      ms  JobManager")
    assert "FINISHED" in story
    assert "0.000" not in story
    assert again == "again: make sim SEED=5 BACKEND=hashmap JOB= STORY=1"
