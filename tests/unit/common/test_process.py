"""Aim: arguments, registration files, host ids, and processes that do not outlive their parents."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jobmanager.main
import taskmanager.main
from common.process import (
    DaemonRegistration,
    host_id,
    parse_daemon_arguments,
    stop_requests,
)
from penstock.client.addresses import format_address, is_loopback, parse_address, parse_addresses
from penstock.errors import ConfigurationError
from penstock.local.daemon_processes import start_ticks
from tests.support.jobs import DEADLINE_S

ROOT = Path(__file__).parents[3]


def test_addresses() -> None:
    assert parse_address("jm-1:6123") == ("jm-1", 6123)
    assert parse_address("[::1]:1") == ("::1", 1)
    assert format_address("::1", 1) == "[::1]:1"
    assert parse_addresses(" a:1, [::1]:2,") == ("a:1", "[::1]:2")
    for text in ("", " , "):
        with pytest.raises(ConfigurationError, match="names no address"):
            parse_addresses(text)
    for text in ("", "a", "a:", ":1", "a:x", "a:65536", "::1:5", "a:-1", "a:²"):
        with pytest.raises(ConfigurationError, match="HOST:PORT"):
            parse_address(text)
    assert [is_loopback(host) for host in ("localhost", "127.9.9.9", "::1")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "example", "10.0.0.1")] == [False] * 4


def test_arguments(tmp_path: Path) -> None:
    arguments = parse_daemon_arguments(
        "taskmanager",
        ["--dir", str(tmp_path), "-D", "rpc.timeout=2s", "--jobmanager", "a:1,b:2"],
    )
    config = arguments.load_configuration()
    assert config.rpc_timeout_ms == 2000
    assert arguments.jobmanager_addresses(config) == ("a:1", "b:2")
    with pytest.raises(ConfigurationError, match="names no address"):
        parse_daemon_arguments("taskmanager", ["--dir", "x", "--jobmanager", ","])
    (tmp_path / "penstock.yaml").write_text("jobmanager.rpc.port: 7000\nrpc.timeout: 5s\n")
    arguments = parse_daemon_arguments("taskmanager", ["--dir", str(tmp_path)])
    config = arguments.load_configuration()
    assert config.rpc_timeout_ms == 5000
    assert arguments.jobmanager_addresses(config) == ("127.0.0.1:7000",)


BACKOFF = "restart-strategy.exponential-delay.max-backoff=1ms"
SPILL = "taskmanager.spill.dir"
COPIES = "execution.checkpointing.local-backup.dirs"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([BACKOFF], r"max-backoff \(1 ms\).*initial-backoff \(1000 ms\)"),
        ([BACKOFF, "restart-strategy.type=fallback"], "max-backoff"),
        ([BACKOFF, "restart-strategy.type=exponential-delay"], "max-backoff"),
        ([f"{SPILL}=/a/b", f"{COPIES}=/a/b"], rf"{COPIES} \(/a/b\) and {SPILL} \(/a/b\)"),
        ([f"{SPILL}=/a/b", f"{COPIES}=/c, /a"], rf"{COPIES} \(/a\) and {SPILL} \(/a/b\)"),
        ([f"{SPILL}=/a/b", f"{COPIES}=/a/b/c"], COPIES),
        ([f"{SPILL}=/a/b", f"{COPIES}=/a/d/../b"], COPIES),
    ],
)
def test_contradictions_end_daemons_at_once(
    tmp_path: Path, overrides: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--dir", str(tmp_path), *(part for text in overrides for part in ("-D", text))]
    for role, main in (
        ("jobmanager", jobmanager.main.main),
        ("taskmanager", taskmanager.main.main),
    ):
        with pytest.raises(ConfigurationError, match=named):
            parse_daemon_arguments(role, argv).load_configuration()
        assert main(argv) == 2
        assert f"{role}: " in capsys.readouterr().err


def test_a_directory_that_cannot_be_looked_into_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / ("x" * 300)
    for main in (jobmanager.main.main, taskmanager.main.main):
        assert main(["--dir", str(directory)]) == 2
        assert f"cannot read {directory}/penstock.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides",
    [
        [BACKOFF, "restart-strategy.exponential-delay.initial-backoff=1ms"],
        [BACKOFF, "restart-strategy.type=fixed-delay"],  # nothing reads it
        [f"{SPILL}=/a/b", f"{COPIES}=/a/c,/a/bb"],
        [f"{COPIES}=/a"],
    ],
)
def test_what_does_not_contradict_itself(tmp_path: Path, overrides: list[str]) -> None:
    argv = ["--dir", str(tmp_path), *(part for text in overrides for part in ("-D", text))]
    assert parse_daemon_arguments("jobmanager", argv).load_configuration()


@pytest.mark.parametrize(
    "argv", [[], ["--dir"], ["--dir", "x", "--jobmanager", "a:1"], ["--di", "x"]]
)
def test_wrong_use(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_daemon_arguments("jobmanager", argv)
    assert caught.value.code == 2
    assert "usage: python -P -m jobmanager" in capsys.readouterr().err


def test_unknown_keys_are_named() -> None:
    with pytest.raises(ConfigurationError, match="did you mean"):
        parse_daemon_arguments("jobmanager", ["--dir", "x", "-D", "rpc.timeoutt=1s"])


def test_registration(tmp_path: Path) -> None:
    registration = DaemonRegistration(tmp_path, "jobmanager", "jm")
    registration.remove()
    registration.write("h:1", "h:2")
    path = tmp_path / "run" / "jobmanager-jm.json"
    assert json.loads(path.read_text()) == {
        "role": "jobmanager",
        "id": "jm",
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
        "address": "h:1",
        "metrics_address": "h:2",
    }
    assert list(path.parent.iterdir()) == [path]
    registration.remove()
    assert list(path.parent.iterdir()) == []
    path.write_text(json.dumps({"pid": 1}))  # another daemon has taken the name
    registration.remove()
    assert path.exists()


def test_host_id(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert host_id("a", tmp_path) == host_id("a", tmp_path)
    assert len({host_id("a", tmp_path), host_id("b", tmp_path), host_id("a", other)}) == 3


def test_a_process_dies_with_its_parent() -> None:
    child = (
        "import os, sys, time\n"
        "from common.process import die_with_parent\n"
        "die_with_parent(int(sys.argv[1]))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())])\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        descriptor = os.pidfd_open(int(process.stdout.readline()))
        process.kill()

        async def ended() -> None:
            event = asyncio.Event()
            asyncio.get_running_loop().add_reader(descriptor, event.set)
            async with asyncio.timeout(DEADLINE_S):
                await event.wait()

        asyncio.run(ended())
        os.close(descriptor)


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    orphan = "from common.process import die_with_parent\ndie_with_parent(1)\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run([sys.executable, "-c", orphan], env=environment, check=False).returncode == 1
    )


def test_signals_ask_to_stop() -> None:
    async def work(number: int) -> None:
        with stop_requests({}) as stop:
            os.kill(os.getpid(), number)
            async with asyncio.timeout(DEADLINE_S):
                await stop.wait()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.run(work(number))
    assert signal.alarm(0) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_parent_death_is_one_or_nothing() -> None:
    async def work() -> None:
        with stop_requests({"PENSTOCK_PARENT_DEATH": "yes"}):
            pass

    with pytest.raises(ConfigurationError, match="set it to 1"):
        asyncio.run(work())
