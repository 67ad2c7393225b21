"""Aim: where the user has a module called as one of ours, each importer gets its own.

Method: a process with a directory of the user's on its path; what imports say in it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

CHECKS = """
# As ours: by statements that run late, in modules that are loaded now and later.
from penstock.client import own_modules
ours = own_modules._ours["common.clock"]
late = compile("from common.clock import SystemClock\\nimport common.log\\nimport common.elements as e\\n"
               "from common import metrics\\nfound = SystemClock, common.log, e, metrics", "x", "exec")
scope = {"__name__": "common.later", "__package__": "common", "__file__": ours.__file__}
exec(late, scope)
assert scope["found"][0] is ours.SystemClock
assert all(own_modules._is_ours(vars(module)) for module in scope["found"][1:])
import taskmanager.processes.mailbox
assert taskmanager.processes.mailbox.__file__.startswith(str(own_modules._ROOT))
# As the user's.
import common, importlib, pickle, typing
assert common.WHOSE == "the user's"
from common.log import Line
assert Line.__module__ == "common.log"
assert importlib.import_module("common.log").Line is Line
assert type(pickle.loads(pickle.dumps(Line()))) is Line
assert typing.get_type_hints(Line) == {"text": str}
in_our_name = {"__name__": "common.later", "__file__": ours.__file__, "pickled": pickle.dumps(Line())}
exec("import pickle\\nloaded = pickle.loads(pickled)", in_our_name)
assert type(in_our_name["loaded"]) is Line
print("ok")
"""


@pytest.mark.parametrize(
    "first",
    [
        "import taskmanager.processes.mailbox",  # as in a slot: ours first
        "import common, common.log",  # as in a test: the user's first
        "",
    ],
)
def test_each_importer_gets_its_own(tmp_path: Path, first: str) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text('WHOSE = "the user\'s"\n')
    (tmp_path / "common" / "log.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Line:\n    text: str = ''\n"
    )
    enter = f"sys.path.insert(0, {str(tmp_path)!r})"
    order = [first, enter] if first.startswith("import taskmanager") else [enter, first]
    text = "\n".join(
        ["import sys", *order, "from penstock.client.own_modules import set_apart",
         "set_apart(['common'])", CHECKS]
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.stdout == "ok\n", ended.stderr


def test_nothing_changes_where_the_user_has_no_such_module(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()  # of data
    (tmp_path / "common" / "rows.csv").write_text("a\n")
    text = (
        f"import builtins, sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "before = builtins.__import__, list(sys.meta_path)\n"
        "from penstock.client.own_modules import set_apart\nset_apart()\n"
        "assert (builtins.__import__, list(sys.meta_path)) == before\n"
    )
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True)
