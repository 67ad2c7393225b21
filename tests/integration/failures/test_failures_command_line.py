"""Aim: the command line tells what is wrong, where, and by its exit status what kind of error it is;
its JSON is what docs/cli.md says.

Method: ``penstock`` as a process, on scripts that are wrong and on one that works.
"""

from __future__ import annotations

import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.client.client import Client
from tests.support.processes import DaemonCluster, Ended, Site

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]

WORKS = """
    import sys
    import penstock as ps

    env = ps.Environment()
    rows = env.from_rows([{"a": a} for a in range(10)]).map(lambda row: row.a + 1, schema={"b": "int64"})
    found = rows.collect()
    env.execute("works")
    print(sorted(row.b for row in found), sys.argv[1:])
"""

Run = Callable[..., Ended]


@pytest.fixture
def run(failure_cluster: DaemonCluster, own_site: Site) -> Run:
    """``penstock run`` of a script with this text."""

    def start(text: str, *options: str, **more: Any) -> Ended:
        path = own_site.directory / "job.py"
        path.write_text(textwrap.dedent(text))
        address = ("--jobmanager", failure_cluster.jobmanager)
        return own_site.penstock("run", *address, *options[: _end(options)], str(path), *options[_end(options):], **more)  # fmt: skip

    return start


def _end(options: tuple[str, ...]) -> int:
    return options.index("--") if "--" in options else len(options)


@pytest.fixture
def command(
    own_site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """A command in this process: what it says and its status, without the time a process takes."""
    monkeypatch.chdir(own_site.directory)
    monkeypatch.setenv("PENSTOCK_DIR", str(own_site.directory / "default-cluster"))

    def invoke(*arguments: str) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        told = capsys.readouterr()
        return Ended(int(ended.value.code or 0), told.out, told.err)

    return invoke


@pytest.fixture
def ask(command: Run, failure_cluster: DaemonCluster) -> Run:
    """A command on the cluster."""
    return lambda *arguments: command(*arguments, "--jobmanager", failure_cluster.jobmanager)


# ---------------------------------------------------------------- scripts


def test_a_script_that_works_gets_its_arguments(run: Run) -> None:
    ended = run(WORKS, "--", "flights.json", "--fast")
    assert ended.status == 0, ended.stderr
    assert "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10] ['flights.json', '--fast']" in ended.stdout
    assert "works FINISHED" in ended.stderr


def test_a_script_with_a_syntax_error(run: Run) -> None:
    ended = run("import penstock as ps\nenv = ps.Environment(\n")
    assert ended.status == 1
    assert "SyntaxError" in ended.stderr
    assert "job.py" in ended.stderr
    assert "line 2" in ended.stderr
    assert "runpy" not in ended.stderr
    assert "penstock/cli" not in ended.stderr


def test_a_script_that_raises_shows_its_own_frames_only(run: Run) -> None:
    ended = run("def f():\n    raise RuntimeError('of the script')\n\nf()\n")
    assert ended.status == 1
    assert "RuntimeError: of the script" in ended.stderr
    assert ended.stderr.count("File ") == 2
    assert "penstock/cli" not in ended.stderr


def test_a_script_that_submits_nothing(run: Run) -> None:
    ended = run("import penstock as ps\nps.Environment().from_rows([{'a': 1}]).discard()\n")
    assert ended.status == 1
    assert "submitted no job" in ended.stderr
    assert "execute" in ended.stderr


@pytest.mark.parametrize(("code", "status"), [("0", 0), ("7", 7), ("None", 0), ("'why'", 1)])
def test_a_script_that_exits_with_a_status(run: Run, code: str, status: int) -> None:
    ended = run(f"{WORKS}\n    sys.exit({code})\n")
    assert ended.status == status
    assert ("why" in ended.stderr) == (code == "'why'")


def test_a_script_whose_job_fails(run: Run) -> None:
    ended = run(WORKS.replace("row.a + 1", "1 // (row.a - 3)"))
    assert ended.status == 1
    assert "ZeroDivisionError" in ended.stderr
    assert "operator 'map'" in ended.stderr
    assert "row: Row(a=3)" in ended.stderr
    assert "job.py" in ended.stderr, "the user's frame"
    assert "penstock/streams/environment.py" not in ended.stderr
    assert ended.stdout == ""


def test_a_script_whose_job_fails_may_go_on(run: Run) -> None:
    caught = """
    import penstock as ps
    env = ps.Environment()
    env.from_rows([{"a": 1}]).map(lambda row: 1 // 0, schema={"b": "int64"}).discard()
    try:
        env.execute("fails")
    except ps.JobFailed as error:
        print(error.operator, error.row)
    """
    ended = run(caught, "--json")
    assert ended.status == 0
    assert [job["status"] for job in ended.json["jobs"]] == ["FAILED"]
    assert "map Row(a=1)" in ended.stderr


def test_a_missing_script_is_wrong_use(command: Run, own_site: Site) -> None:
    for name in ("run", "plan"):
        ended = command(name, "nothing.py")
        assert ended.status == 2
        assert "nothing.py" in ended.stderr
    assert command("run", str(own_site.directory)).status == 2


def test_an_unreadable_script_encoding(run: Run, own_site: Site) -> None:
    (own_site.directory / "bad.py").write_bytes(b"x = '\xff'\n")
    ended = own_site.penstock("run", "bad.py")
    assert ended.status == 1
    assert "SyntaxError" in ended.stderr
    assert "penstock/cli" not in ended.stderr


def test_detach_returns_when_the_job_is_submitted(run: Run, ask: Run) -> None:
    endless = """
    import penstock as ps, pyarrow as pa
    env = ps.Environment()
    make = lambda start, count: pa.record_batch({"a": pa.array(range(start, start + count), pa.int64())})
    env.generate(make, rate=10, schema=pa.schema([("a", pa.int64())])).discard()
    env.execute("detached")
    """
    ended = run(endless, "--detach", "--json")
    assert ended.status == 0, ended.stderr
    (job,) = ended.json["jobs"]
    assert job["status"] in ("CREATED", "RUNNING")
    prefix = job["job_id"][:8]
    cancelled = ask("cancel", prefix, "--json")
    assert cancelled.status == 0
    assert cancelled.json["state"] == "CANCELED"
    again = ask("cancel", prefix)
    assert again.status == 0


# ---------------------------------------------------------------- code that travels


def test_modules_of_the_scripts_directory_travel(run: Run, own_site: Site) -> None:
    (own_site.directory / "rules.py").write_text(
        "import steps.add\ndef apply(row):\n    return steps.add.one(row.a)\n"
    )
    (own_site.directory / "steps").mkdir()
    (own_site.directory / "steps" / "__init__.py").write_text("")
    (own_site.directory / "steps" / "add.py").write_text(
        "def one(a):\n    import steps.late\n    return a + steps.late.ONE\n"
    )
    (own_site.directory / "steps" / "late.py").write_text("ONE = 1\n")
    text = WORKS.replace("lambda row: row.a + 1", "rules.apply").replace("sys\n", "sys, rules\n", 1)
    ended = run(text)
    assert ended.status == 0, ended.stderr
    assert "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" in ended.stdout


@pytest.mark.parametrize("form", ["file", "package", "directory", "zip"])
def test_py_files_travel(run: Run, tmp_path: Path, form: str) -> None:
    library = tmp_path / "library"
    library.mkdir()
    source = "def apply(row):\n    return row.a + 1\n"
    if form == "file":
        path = library / "extra_rules.py"
        path.write_text(source)
    elif form == "package":
        path = library / "extra_rules"
        path.mkdir()
        (path / "__init__.py").write_text(source)
    elif form == "directory":
        path = library
        (path / "extra_rules.py").write_text(source)
    else:
        path = tmp_path / "library.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("extra_rules.py", source)
    text = WORKS.replace("lambda row: row.a + 1", "extra_rules.apply")
    ended = run(text.replace("sys\n", "sys, extra_rules\n", 1), "--py-files", str(path))
    assert ended.status == 0, ended.stderr
    assert "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" in ended.stdout


def test_py_files_that_are_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.zip").write_text("no zip")
    (tmp_path / "notes.txt").write_text("no code")
    for name, status in (("broken.zip", 1), ("notes.txt", 1), ("missing.py", 2)):
        ended = run(WORKS, "--py-files", str(tmp_path / name))
        assert ended.status == status, ended.stderr
        assert name in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_module_that_the_slots_do_not_have(run: Run, own_site: Site) -> None:
    (own_site.directory / "gone.py").write_text("")
    text = """
    import sys, pathlib
    import penstock as ps

    def apply(row):
        import not_installed_anywhere
        return 1

    env = ps.Environment()
    env.from_rows([{"a": 1}]).map(apply, schema={"b": "int64"}).discard()
    env.execute("misses-a-module")
    """
    ended = run(text)
    assert ended.status == 1
    assert "No module named 'not_installed_anywhere'" in ended.stderr
    assert "import not_installed_anywhere" in ended.stderr


@pytest.mark.parametrize(
    ("name", "form"), [("common", "module"), ("jobmanager", "package"), ("taskmanager", "module")]
)
def test_a_module_named_like_a_package_of_ours(
    run: Run, own_site: Site, name: str, form: str
) -> None:
    if form == "module":
        (own_site.directory / f"{name}.py").write_text("ONE = 1\n")
    else:
        (own_site.directory / name).mkdir()
        (own_site.directory / name / "__init__.py").write_text("ONE = 1\n")
    used = WORKS.replace("import sys", f"import sys, {name}").replace("+ 1", f"+ {name}.ONE")
    ended = run(used)
    assert ended.status == 0, ended.stderr
    assert "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" in ended.stdout


def test_py_files_with_a_module_named_like_a_package_of_ours(run: Run, tmp_path: Path) -> None:
    (tmp_path / "common.py").write_text("ONE = 1\n")
    used = WORKS.replace("+ 1", '+ __import__("common").ONE')
    ended = run(used, "--py-files", str(tmp_path / "common.py"))
    assert ended.status == 0, ended.stderr
    assert "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" in ended.stdout


def test_daemons_start_in_a_directory_with_modules_named_like_ours(own_site: Site) -> None:
    for name in ("common", "jobmanager", "taskmanager", "penstock"):
        (own_site.directory / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")
    (own_site.directory / "job.py").write_text(textwrap.dedent(WORKS))
    ended = own_site.start_python("-P", "job.py").wait()
    assert ended.status == 0, ended.stderr
    own_site.assert_nothing_left()


def test_a_python_path_that_would_shadow_penstock_is_refused(
    command: Run, own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("penstock", "common"):  # the latter without __init__
        library = own_site.directory / f"library-{name}"
        (library / name).mkdir(parents=True)
        monkeypatch.setenv("PYTHONPATH", str(library))
        ended = command("cluster", "start", "--dir", str(own_site.directory / "c"))
        assert ended.status == 1
        assert repr(name) in ended.stderr
        assert "PYTHONPATH" in ended.stderr
    own_site.assert_nothing_left()


# ---------------------------------------------------------------- options and exit statuses


def test_wrong_options_are_wrong_use(command: Run, own_site: Site) -> None:
    (own_site.directory / "job.py").write_text(textwrap.dedent(WORKS))
    for options, told in (
        (("-D", "heartbeat.timeuot=3s"), "did you mean heartbeat.timeout?"),
        (("-D", "heartbeat.timeout"), "write -D key=value"),
        (("-D", "heartbeat.timeout=soon"), "heartbeat.timeout"),
        (("--no-such-option",), "--no-such-option"),
    ):
        ended = command("run", "job.py", *options)
        assert ended.status == 2, (options, ended.stderr)
        assert told in ended.stderr
        assert "Traceback" not in ended.stderr
    directory = str(own_site.directory / "never")
    for options, told in (
        (("-D", "heartbeat.timeuot=3s"), "did you mean heartbeat.timeout?"),
        (("-D", "heartbeat.timeout=soon"), "heartbeat.timeout"),
        (("--taskmanagers", "0"), "--taskmanagers"),
        (("--slots", "none"), "--slots"),
    ):
        ended = command("cluster", "start", "--dir", directory, *options)
        assert ended.status == 2, (options, ended.stderr)
        assert told in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not Path(directory).exists()


def test_a_wrong_configuration_file_is_wrong_use(command: Run, own_site: Site) -> None:
    (own_site.directory / "penstock.yaml").write_text("heartbeat.timeuot: 3s\n")
    for arguments in (("list",), ("cluster", "start", "--dir", str(own_site.directory))):
        ended = command(*arguments)
        assert ended.status == 2, ended.stderr
        assert "heartbeat.timeuot" in ended.stderr
        assert "did you mean" in ended.stderr
    (own_site.directory / "penstock.yaml").write_text("- no\n- mapping\n")
    ended = command("list")
    assert ended.status == 2
    assert "penstock.yaml" in ended.stderr


def test_a_cluster_directory_that_cannot_be_written(command: Run, own_site: Site) -> None:
    (own_site.directory / "file").write_text("")
    ended = command("cluster", "start", "--dir", str(own_site.directory / "file" / "c"))
    assert ended.status == 1
    assert "--dir" in ended.stderr
    assert "Traceback" not in ended.stderr
    own_site.assert_nothing_left()


def test_commands_without_a_cluster(command: Run, own_site: Site) -> None:
    (own_site.directory / "job.py").write_text(textwrap.dedent(WORKS))
    (own_site.directory / "penstock.yaml").write_text("jobmanager.rpc.port: 1\n")
    for arguments in (("list",), ("info", "x"), ("cancel", "x"), ("logs", "x"), ("run", "job.py")):
        ended = command(*arguments)
        assert ended.status == 3, ended.stderr
        assert "penstock cluster start" in ended.stderr
        assert "Traceback" not in ended.stderr
    stopped = command("cluster", "stop", "--json", "--dir", "nowhere")
    assert (stopped.status, stopped.json) == (0, {"stopped": []})
    status = command("cluster", "status", "--json", "--dir", "nowhere")
    assert status.status == 0
    assert status.json["daemons"] == []
    assert not (own_site.directory / "nowhere").exists()


def test_a_job_that_there_is_not(ask: Run) -> None:
    for name in ("info", "cancel", "logs"):
        ended = ask(name, "feedfeed")
        assert ended.status == 1
        assert "there is no job feedfeed" in ended.stderr
    ended = ask("logs", "feedfeed", "--subtask", "0")
    assert ended.status == 2
    assert "v1/0" in ended.stderr


# ---------------------------------------------------------------- JSON

SUMMARY = {
    "job_id",
    "name",
    "state",
    "submitted_at_ms",
    "running_at_ms",
    "ended_at_ms",
    "restarts",
    "problem",
}
METRICS = {
    "records_in",
    "records_out",
    "bytes_in",
    "bytes_out",
    "busy_ms",
    "idle_ms",
    "back_pressured_ms",
    "watermark_ms",
    "late_records",
    "bad_records",
    "checkpoint_alignment_ms",
    "checkpoint_start_delay_ms",
    "checkpoint_aligned_bytes",
    "state_bytes",
    "restored_local_bytes",
    "restored_store_bytes",
    "local_backup_failures",
}
INFO = SUMMARY | {
    "repeated_output",
    "last_checkpoint_id",
    "last_checkpoint_at_ms",
    "failed_checkpoints",
    "slot_wait",
    "vertices",
    "failure",
}
CHECKPOINT = {
    "id",
    "status",
    "triggered_at_ms",
    "ended_at_ms",
    "duration_ms",
    "acknowledged_subtasks",
    "total_subtasks",
    "state_bytes",
    "uploaded_bytes",
    "start_delay_ms",
    "alignment_ms",
    "aligned_bytes",
    "sync_ms",
    "async_ms",
    "failure",
    "path",
    "retained",
}
FAILURE = {
    "error_class",
    "message",
    "vertex",
    "subtask_index",
    "attempt",
    "operator",
    "row",
    "position",
    "traceback",
    "taskmanager_id",
    "timestamp_ms",
}


def test_the_json_of_a_job(run: Run, ask: Run) -> None:
    printing = WORKS.replace("row.a + 1", "print(row.a) or row.a + 1")
    ended = run(printing, "--json")
    assert ended.status == 0, ended.stderr
    (job,) = ended.json["jobs"]
    assert "[1, 2, 3" in ended.stderr, "what the script prints is not in the way of the JSON"
    assert job.keys() == {"job_id", "name", "status", "duration_s", "metrics"}
    assert (job["name"], job["status"]) == ("works", "FINISHED")
    assert job["duration_s"] >= 0

    listed = ask("list", "--json")
    assert listed.json.keys() == {"jobs"}
    assert all(one.keys() == SUMMARY for one in listed.json["jobs"])
    assert job["job_id"] in [one["job_id"] for one in listed.json["jobs"]]

    info = ask("info", job["job_id"], "--json").json
    assert info.keys() == INFO
    assert info["failure"] is None
    assert (info["restarts"], info["failed_checkpoints"]) == (0, 0)

    # At the end of its data a job takes one that commits what it has collected.
    listed = ask("checkpoints", job["job_id"], "--json").json
    assert listed.keys() == {
        "job_id",
        "completed_count",
        "failed_count",
        "restored_checkpoint_id",
        "checkpoints",
    }
    assert (listed["completed_count"], listed["failed_count"]) == (1, 0)
    assert listed["restored_checkpoint_id"] is None
    (checkpoint,) = listed["checkpoints"]
    assert checkpoint.keys() == CHECKPOINT
    assert (checkpoint["status"], checkpoint["failure"]) == ("COMPLETED", "")
    assert checkpoint["duration_ms"] == checkpoint["ended_at_ms"] - checkpoint["triggered_at_ms"]
    assert checkpoint["id"] == info["last_checkpoint_id"]
    assert ask("checkpoint", job["job_id"], "--json").status == 1, "it has ended"
    for vertex in info["vertices"]:
        assert vertex.keys() == {
            "id",
            "name",
            "parallelism",
            "max_parallelism",
            "operators",
            "subtasks",
            "speculative_attempts",
        }
        for subtask in vertex["subtasks"]:
            assert subtask.keys() == {
                "subtask_index",
                "attempt",
                "state",
                "taskmanager_id",
                "slot_id",
                "metrics",
            }
            assert subtask["metrics"].keys() == METRICS
    vertex = info["vertices"][0]

    logs = ask("logs", job["job_id"], "--json").json
    assert logs.keys() == {"logs"}
    assert all(e.keys() == {"vertex", "subtask_index", "attempt", "text"} for e in logs["logs"])
    assert "".join(e["text"] for e in logs["logs"]).split() == [str(n) for n in range(10)]
    one = ask("logs", job["job_id"], "--subtask", f"{vertex['id']}/0")
    assert one.stdout.splitlines()[1:] == [str(n) for n in range(10)]


def test_the_json_of_a_failed_job(run: Run, ask: Run) -> None:
    ended = run(WORKS.replace("row.a + 1", "1 // (row.a - 3)"), "--json")
    assert ended.status == 1
    (job,) = ended.json["jobs"]
    assert job["status"] == "FAILED"
    info = ask("info", job["job_id"], "--json").json
    failure = info["failure"]
    assert failure.keys() == FAILURE
    assert failure["error_class"] == "TaskFailure"
    assert failure["vertex"] in [vertex["id"] for vertex in info["vertices"]]
    assert failure["operator"] == "map"
    assert failure["row"] == "Row(a=3)"
    assert "ZeroDivisionError" in failure["traceback"]
    text = ask("info", job["job_id"]).stdout
    for told in ("FAILED", "ZeroDivisionError", "row: Row(a=3)", "operator 'map'"):
        assert told in text
    logs = ask("logs", job["job_id"]).stdout
    assert "ZeroDivisionError" in logs, "the log of the attempt says why it ended"


def test_the_plan_runs_nothing(command: Run, own_site: Site, client: Client) -> None:
    before = len(client.jobs())
    (own_site.directory / "job.py").write_text("print('first')\n" + textwrap.dedent(WORKS))
    ended = command("plan", "job.py", "--json")
    assert ended.status == 0, ended.stderr
    assert {"name", "vertices", "edges"} <= ended.json.keys()
    assert ended.json["name"] == "works"
    (own_site.directory / "job.py").write_text("import penstock\n")
    ended = command("plan", "job.py")
    assert ended.status == 1
    assert "submitted no job" in ended.stderr
    assert len(client.jobs()) == before


def test_the_json_of_a_cluster(
    command: Run, failure_cluster: DaemonCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(failure_cluster.directory)
    status = command("cluster", "status", "--json", "--dir", directory).json
    assert status.keys() == {"jobmanager", "directory", "daemons"}
    assert status["jobmanager"] == failure_cluster.jobmanager
    assert len(status["daemons"]) == 3
    for daemon in status["daemons"]:
        assert daemon.keys() == {
            "role",
            "id",
            "pid",
            "address",
            "metrics_address",
            "alive",
            "held_partitions",
        }
        assert daemon["held_partitions"] == (0 if daemon["role"] == "taskmanager" else None)
        assert daemon["alive"] is True
    # The default cluster is the one in $PENSTOCK_DIR.
    monkeypatch.setenv("PENSTOCK_DIR", directory)
    assert command("cluster", "status", "--json").json == status
    assert command("list", "--json").status == 0


def test_nexmark_on_a_directory_that_cannot_be_written(command: Run, own_site: Site) -> None:
    (own_site.directory / "file").write_text("")
    out = str(own_site.directory / "file" / "out")
    ended = command("nexmark", "--events", "10", "--out", out)
    assert ended.status == 1
    assert out in ended.stderr
    assert "Traceback" not in ended.stderr
    out = str(own_site.directory / "out")
    ended = command("nexmark", "--events", "100", "--out", out, "--json")
    assert ended.json.keys() == {"events", "directory", "rows", "files", "seconds"}
    assert ended.json["events"] == 100
    assert all(Path(file).is_file() for file in ended.json["files"])
