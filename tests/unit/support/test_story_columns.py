"""The story of a simulation, drawn.

Aim: who reads a failed seed sees each process below its own heading, in the order of time, within the width, and is told
of whatever is left out. Method: moments made up here.
"""

from __future__ import annotations

import doctest
import re

from common.pb import internal_pb2
from tests.support import story_columns
from tests.support.simulated_messages import call_words
from tests.support.story_columns import WIDTH, Moment, columns_of, draw


def moments(*told: tuple[int, str, str]) -> list[Moment]:
    return [Moment(at_ms * 1_000_000, process, text) for at_ms, process, text in told]


def test_the_example_is_true() -> None:
    ran = doctest.testmod(story_columns)
    assert ran.attempted
    assert not ran.failed


def test_a_column_per_process_and_time_downwards() -> None:
    story = moments(
        (1, "tm0.1", "starts"),
        (2, "JobManager", "> deploy v0/0#0"),
        (3, "tm0.1", "< deploy v0/0#0"),
        (3, "tm0.1/2", "< deploy v0/0#0"),
        (4, "", "fault: a slot process dies"),
        (4, "tm0.1/2", "dies"),
    )
    assert draw(story, 90).splitlines() == [
        "      ms  JobManager                tm0                       tm0 slot 1",
        "   1.000                            starts",
        "   2.000  > deploy v0/0#0",
        "   3.000                            < deploy v0/0#0           < deploy v0/0#0",
        "   4.000  == fault: a slot process dies ==",
        "   4.000                                                      dies",
    ]


def test_what_happens_to_the_left_at_the_same_time_is_a_line_of_its_own() -> None:
    """One reads the lines from top to bottom: nothing stands beside or above what came before it."""
    drawn = draw(moments((1, "tm0.1", "first"), (1, "JobManager", "second"), (1, "tm0.1", "third")))
    assert [line.split()[1:] for line in drawn.splitlines()[1:]] == [
        ["first"],
        ["second", "third"],
    ]


def test_a_process_goes_on_in_the_column_of_one_that_has_ended() -> None:
    story = moments(
        (1, "tm0.1/1", "a"), (2, "tm0.1/2", "b"), (3, "tm0.1/1", "a ends"), (4, "tm0.1/3", "c")
    )
    assert [sorted(column.processes) for column in columns_of(story)] == [
        ["tm0.1/1", "tm0.1/3"],
        ["tm0.1/2"],
    ]
    assert "[tm0.1/3] c" in draw(story)
    assert "[tm0.1/2]" not in draw(story), "it is alone in its column"


def test_lives_of_one_taskmanager_share_its_column() -> None:
    drawn = draw(moments((1, "tm0.1", "dies"), (2, "tm0.2", "starts"), (3, "tm0.2", "goes on")))
    assert drawn.splitlines()[0].split() == ["ms", "tm0"]
    assert drawn.count("[tm0.1]") == drawn.count("[tm0.2]") == 1


def test_too_many_processes_share_columns_the_slots_of_a_host_first() -> None:
    everybody = [(1, "JobManager", "x")]
    everybody += [(1, f"tm{tm}.1", "x") for tm in range(3)]
    everybody += [(1, f"tm{tm}.1/{slot}", f"{tm}/{slot}") for tm in range(3) for slot in range(4)]
    story = moments(*everybody, *everybody)
    header = draw(story).splitlines()[0].split(maxsplit=1)[1]
    assert re.split("  +", header) == [
        "JobManager",
        "tm0",
        "tm0 slots",
        "tm1 and slots",
        "tm2 and slots",
    ]
    assert all(f"[tm{tm}.1/3]" in draw(story) for tm in (0, 1, 2))


def test_hosts_share_the_last_column_where_not_even_they_have_room() -> None:
    story = moments(*((host, f"tm{host}.1", f"x{host}") for host in range(40)))
    drawn = draw(story)
    assert "others" in drawn.splitlines()[0]
    assert all(f"x{host}" in drawn for host in range(40))


def test_nothing_is_wider_than_asked_for_and_a_long_text_is_cut() -> None:
    story = moments(
        (1, "JobManager", "word " * 200), (2, "tm0.1", "x" * 500), (3, "", "fault: " + "y" * 700)
    )
    for width in (40, 80, WIDTH):
        lines = draw(story, width).splitlines()
        assert max(map(len, lines)) <= width
        assert any(line.rstrip().endswith("…") for line in lines)
        assert len(lines) < 20


def test_the_middle_of_a_long_story_is_left_out_and_counted() -> None:
    drawn = draw(moments(*((at, "JobManager", f"event {at}") for at in range(1000))), 80, 100)
    lines = drawn.splitlines()
    assert len(lines) == 1 + 100 + 1
    assert sum("900 moments are left out" in line for line in lines) == 1
    assert "event 0" in lines[1]
    assert "event 999" in lines[-1]


def test_nothing_has_happened() -> None:
    assert draw([]).strip() == "ms"


def test_a_call_says_once_what_it_says_of_several_subtasks() -> None:
    request = internal_pb2.SendTaskCommandsRequest()
    for subtask in (0, 1):
        command = request.commands.add()
        command.attempt.vertex, command.attempt.subtask_index = "v0", subtask
        command.trigger_checkpoint.checkpoint_id = 7
    assert call_words("SendTaskCommands", request) == ["v0/0#0 v0/1#0 trigger 7"]
    assert call_words("Heartbeat", internal_pb2.HeartbeatRequest()) == []
