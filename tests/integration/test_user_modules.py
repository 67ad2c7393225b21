"""Aim: a user's modules may be called as ours are, and each side goes on to see its own.

Method: a project whose modules take every name that ours have, run on an embedded cluster, by ``penstock run``,
with ``--py-files`` and with ``penstock.testing``; its functions say which modules they met.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import DaemonCluster, Ended, Site, site

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]

FILES = {
    "common/__init__.py": "NAME = 'common of the user'\n",
    "common/models.py": """
        from __future__ import annotations
        from dataclasses import dataclass, field
        from . import NAME
        from .sub import deep
        @dataclass
        class Order:
            amount: int
            tags: list[str] = field(default_factory=list)
            def doubled(self) -> int:
                return deep.double(self.amount)
        def add_one(row):
            assert NAME == "common of the user"
            return {"n": Order(row["n"]).doubled() + 1}
        """,
    "common/sub/__init__.py": "",
    "common/sub/deep.py": "def double(n):\n    return 2 * n\n",
    # As ours are called, loaded long before.
    "common/log.py": "class Line:\n    text = 'of the user'\n    def __call__(self, row):\n        return {'n': row['n'] + 1000}\n",
    "common/clock.py": "TICK = 1\n",
    "common/late.py": "import common.clock\nfrom common.log import Line\nHUNDRED = 100 * common.clock.TICK\n",
    "taskmanager/__init__.py": "",
    "taskmanager/task/__init__.py": "",
    "taskmanager/processes/mailbox.py": "SIZE = 10\n",
    "jobmanager.py": "BIG = 10_000\n",
}

FUNCTIONS = """
import penstock as ps
import jobmanager
import common.models
import taskmanager.processes.mailbox
from common.log import Line
from common.models import Order, add_one


def by_value(row):
    import importlib
    import pickle
    import common.late
    from common.models import Order as Again
    from taskmanager.processes.mailbox import SIZE
    order = pickle.loads(pickle.dumps(Again(row["n"], ["a"])))
    assert type(order) is Again is Order and order.tags == ["a"]
    assert importlib.import_module("common.late").Line is Line and Line.text == "of the user"
    return {"n": order.amount + common.late.HUNDRED + SIZE + jobmanager.BIG}


class Count(ps.KeyedProcessFunction):
    last = ps.ValueState("last", ps.PICKLE)

    def process(self, row, ctx, out):
        import common.sub.deep
        kept = self.last.value() or Order(0)
        self.last.update(Order(kept.amount + row.n))
        out.emit({"key": ctx.key, "total": common.sub.deep.double(kept.amount + row.n)})
"""

JOB = """
import os, sys
from pathlib import Path
from functions import *


def fails_once(row, marker=os.path.abspath("failed")):
    import common.clock
    if row.n > 11_115 and not Path(marker).exists():
        Path(marker).touch()
        raise RuntimeError("once")
    return {"n": row.n, "key": row.n % 2}


config = {
    "state.backend.type": sys.argv[1] if len(sys.argv) > 1 else "hashmap",
    "restart-strategy.type": "fixed-delay", "restart-strategy.fixed-delay.delay": "1ms",
    "execution.checkpointing.interval": "100ms",
}
env = ps.Environment(parallelism=2, config=config)
n = {"n": "int64"}
rows = (
    env.from_rows([{"n": i} for i in range(6)])
    .rebalance().map(add_one, schema=n).map(Line(), schema=n).map(by_value, schema=n)
    .map(fails_once, schema={"n": "int64", "key": "int64"}).key_by("key")
    .process(Count(), schema={"key": "int64", "total": "int64"}).uid("count").collect()
)
env.execute("names")
print("result", max(row.total for row in rows))
"""

EXPECTED = 2 * sum(2 * i + 1 + 1000 + 100 + 10 + 10_000 for i in range(6))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as place:
        yield place
        place.assert_nothing_left()


def write_project(directory: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in {**files, "functions.py": FUNCTIONS, "job.py": JOB}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return directory


def assert_right(ended: Ended) -> None:
    assert f"result {EXPECTED}" in ended.stdout, ended.stdout + ended.stderr


WARM_UP = """
import penstock.testing as pt
with pt.harness(lambda s: s.map(lambda row: {"n": row.n}, schema={"n": "int64"}), schema={"n": "int64"}) as h:
    h.push({"n": 1})
    assert h.take() == [{"n": 1}]
"""

RUN = """
n = {"n": "int64"}
chain = lambda s: s.map(add_one, schema=n).map(Line(), schema=n).map(by_value, schema=n)
with pt.harness(chain, schema=n) as h:
    h.push({"n": 1})
    assert h.take() == [{"n": 2 + 1 + 1000 + 100 + 10 + 10_000}]
for backend in ("hashmap", "rocksdb"):
    totals = {"key": "int64", "total": "int64"}
    shape = {"keys": ["key"], "schema": {"key": "int64", "n": "int64"}, "output_schema": totals}
    with pt.harness(Count(), backend=backend, **shape) as h:
        h.push({"key": 1, "n": 4})
        snapshot = h.snapshot()
    with pt.harness(Count(), backend=backend, restore=snapshot, **shape) as h:
        h.push({"key": 1, "n": 4})
        assert h.take() == [{"key": 1, "total": 16}]
print("done")
"""


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_modules_called_as_ours_beside_an_embedded_script(place: Site, backend: str) -> None:
    project = write_project(place.directory / "project")
    assert_right(place.start_python("job.py", backend, directory=project).wait())
    assert (project / "failed").exists(), "the restart is part of the test"


SMALL = """
import penstock as ps
import common.models

env = ps.Environment(parallelism=1)
n = {"n": "int64"}
rows = env.from_rows([{"n": 1}]).map(common.models.add_one, schema=n).map(lambda row: common.models.add_one(row), schema=n)
print("result", [row.n for row in rows.collect()])
"""
MODELS = "def add_one(row):\n    import common.more\n    return {'n': row['n'] + common.more.ONE}\n"


def write_small(directory: Path) -> Path:
    (directory / "common").mkdir(parents=True)
    (directory / "common" / "models.py").write_text(MODELS)
    (directory / "common" / "more.py").write_text("ONE = 1\n")
    return directory


def test_a_package_without_init_beside_a_plain_script(place: Site) -> None:
    project = write_small(place.directory / "project")
    (project / "job.py").write_text(SMALL)
    ended = place.start_python("job.py", directory=project).wait()
    assert "result [3]" in ended.stdout, ended.stdout + ended.stderr


def test_the_testing_kit_beside_a_package_without_init(place: Site) -> None:
    project = write_small(place.directory / "project")
    (project / "try_it.py").write_text(
        f"import penstock\nimport common.models\n{WARM_UP}print('done')"
    )
    ended = place.start_python("try_it.py", directory=project).wait()
    assert ended.stdout.splitlines()[-1:] == ["done"], ended.stderr


def test_modules_called_as_ours_on_the_python_path(place: Site) -> None:
    library = write_small(place.directory / "library")
    (library / "common" / "__init__.py").touch()
    script = place.directory / "script"
    script.mkdir()
    (script / "job.py").write_text(SMALL)
    place.environment["PYTHONPATH"] = str(library)
    ended = place.start_python("job.py", directory=script).wait()
    assert "result [3]" in ended.stdout, ended.stdout + ended.stderr
    with _local_cluster(place) as address:
        ended = place.penstock("run", "--jobmanager", address, "job.py", directory=script)
        assert "result [3]" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize("init", [True, False])
def test_modules_called_as_ours_in_archives(place: Site, init: bool) -> None:
    library = write_small(place.directory / "library")
    if init:
        (library / "common" / "__init__.py").touch()
    script = place.directory / "script"
    script.mkdir()
    (script / "job.py").write_text(SMALL)
    archive = shutil.make_archive(str(place.directory / "archive"), "zip", library)
    with _local_cluster(place) as address:
        at = ("run", "--jobmanager", address, "--py-files", archive)
        ended = place.penstock(*at, "job.py", directory=script)
        assert "result [3]" in ended.stdout, ended.stdout + ended.stderr


@contextlib.contextmanager
def _local_cluster(place: Site) -> Iterator[str]:
    local = str(place.directory / "local")
    free_port = ("-D", "jobmanager.rpc.port=0")
    started = place.penstock("cluster", "start", "--dir", local, *free_port)
    assert started.status == 0, started.stderr
    try:
        yield _address(place, local)
    finally:
        place.penstock("cluster", "stop", "--dir", local)


def _address(place: Site, directory: str) -> str:
    told = place.penstock("cluster", "status", "--dir", directory, "--json")
    return str(json.loads(told.stdout)["jobmanager"])


def test_modules_called_as_ours_on_a_cluster(place: Site) -> None:
    cluster = DaemonCluster(place)
    cluster.start(taskmanagers=2, slots=1)
    at = ("run", "--jobmanager", cluster.jobmanager)
    # A package without __init__ gives way to any other of its name, here to ours, unless that is prevented.
    project = write_project(place.directory / "project")
    (project / "taskmanager" / "__init__.py").unlink()
    (project / "taskmanager" / "task" / "__init__.py").unlink()
    assert_right(place.penstock(*at, "job.py", directory=project))

    # Elsewhere, shipped as directories, files and archives.
    apart = write_project(place.directory / "apart")
    script = place.directory / "script"
    script.mkdir()
    (apart / "job.py").rename(script / "job.py")
    shipped = [
        argument
        for name in ("common", "jobmanager.py", "functions.py")
        for argument in ("--py-files", str(apart / name))
    ]
    holder = place.directory / "holder"
    holder.mkdir()
    (apart / "taskmanager").rename(holder / "taskmanager")
    shipped += ["--py-files", str(holder)]
    ended = place.penstock(*at, *shipped, "job.py", directory=script)
    assert_right(ended)
    cluster.stop()


@pytest.mark.parametrize("when", ["before", "after"])
def test_modules_called_as_ours_under_test(place: Site, when: str) -> None:
    project = write_project(place.directory / "project")
    imported = "from functions import Line, Count, add_one, by_value"
    # After: the runtime has been loaded before the user's modules are.
    parts = [imported, WARM_UP] if when == "before" else [WARM_UP, imported]
    (project / "try_it.py").write_text("\n".join([*parts, RUN]))
    ended = place.start_python("try_it.py", directory=project).wait()
    assert ended.stdout.splitlines()[-1:] == ["done"], ended.stderr
