"""Aim: no call to storage runs on threads that others need: one that hangs would take them along.

Method: reads which modules of the JobManager use the event loop's own pool; those that may are named, with what they do
there. Storage is called through ``StoreCallsRunner``, or on named threads of the caller's own.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAY = {
    "jobmanager/assembly_runner.py": "begins: nobody is served yet",
    "jobmanager/main.py": "begins and ends, on the disk of its own directory",
    "jobmanager/rpc/open_ports_runner.py": "begins: reads the token's file",
}


def uses_shared_threads(source: str) -> bool:
    """Whether a module gives work to the event loop's own pool."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "to_thread")
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "run_in_executor"
            and isinstance(node.args[0], ast.Constant)
        )
        for node in ast.walk(ast.parse(source))
    )


def test_nothing_of_a_jobmanager_that_leads_waits_on_threads_that_all_share() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "jobmanager").rglob("*.py")
        if "_pb2" not in path.name and uses_shared_threads(path.read_text())
    }
    assert found == MAY.keys()


def test_work_for_those_threads_is_seen() -> None:
    assert uses_shared_threads("await asyncio.to_thread(look)")
    assert uses_shared_threads("await loop.run_in_executor(None, look)")
    assert not uses_shared_threads("await loop.run_in_executor(self._threads, look)")
