"""Aim: what cannot be compiled is refused when the job is built, with the line of the user's file and the reason."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps

SCHEMA = pa.schema(
    [("user", pa.string()), ("a", pa.int64()), ("x", pa.float64()), ("u", pa.uint64())]
)

REFUSED = [
    ("x = row.user", "'user' is of type string"),
    ("self.total.update(row.x)", "what is an integer is given a number with fractions"),
    ("self.total.update(row.u)", "'u' is of type uint64"),
    ("self.total.update(row.b)", "there is no column 'b'"),
    ("self.missing.update(1)", "self.missing.update() is not compiled"),
    ("self.names.update(1)", "self.names.update() is not compiled"),
    ("self.limit = 3", "Assign is not compiled"),
    ("x = [1, 2]", "a list is not compiled"),
    ("x = {'a': 1}", "a dict is not compiled"),
    ("x = 'text'", "is no number"),
    ("x = print(3)", "print() is not compiled"),
    ("x = other(3)", "other() is not compiled"),
    ("x = unknown", "unknown is no number"),
    ("x = row.a ** row.a", "exponent"),
    ("x = 2 ** 65", "exponent"),
    ("x = 9223372036854775808", "more than 64 bits"),
    ("for x in row.user: pass", "for is over|For is not compiled|loops are over"),
    ("for x in range(0, 3, row.a): pass", "the step of range"),
    ("for x in range(row.x): pass", "takes? integers"),
    ("try:\n    pass\nexcept ValueError:\n    pass", "try is not compiled"),
    ("with open('x'): pass", "with is not compiled"),
    ("return 3", "a value that is returned"),
    ("yield {'user': 'a'}", "yield"),
    ("assert row.a", "assert"),
    ("out.emit(user='b', n=1)", "column 'user' of type string"),
    ("out.emit(n=1)", "no column user"),
    ("out.emit(user=row.user, n=1, m=2)", "no output column 'm'"),
    ("out.emit(user=row.user, n=row.x)", "what is an integer is given a number with fractions"),
    ("out.emit(user=row.user, n=row.a > 1)", "what is an integer is given a boolean"),
    ("out.side('late', row)", "out.side() is not compiled"),
    ("raise KeyboardInterrupt('x')", "no built-in exception"),
    ("raise ValueError(row.a)", "an error is raised with a text"),
    ("if row.a:\n    y = 1\nx = y", "'y' may have no value here"),
    ("while row.a:\n    y = 1\nx = y", "'y' may have no value here"),
    ("x = row.a if row.a is row.x else 1", "'is' is for None"),
    ("x = row.a in (1, 2)", "not compiled"),
    ("x = min(row.a, row.x)", "min() of an integer and a number with fractions"),
    ("x = row.x & 3", "& takes integers or booleans"),
    ("ctx.timers.event_time(row.x)", "take integers"),
    ("ctx.timers.next_time(3)", "timers have"),
    ("row = 3", "'row' cannot be given another value"),
    ("s_total = 3\nself.total.update(s_total)", "'s_total' is an array of the compiled loop"),
    ("r_0 = 3\nout.emit(user=row.user, n=r_0)", "'r_0' is an array of the compiled loop"),
    ("x = lambda: 3", "a function within it is not compiled"),
    ("x = ctx.key", "'user' is of type string"),
    (
        "x = row.a\nif row.x > 1.0:\n    x = 0.5\nout.emit(user=row.user, n=int(x))",
        "'x' is sometimes an integer, sometimes",
    ),
    (
        "x = row.a > 1\nif row.x > 1.0:\n    x = row.a\nout.emit(user=row.user, n=int(x))",
        "'x' is sometimes an integer, sometimes",
    ),
    (
        "x = row.a if row.x > 1.0 else 2.5\nout.emit(user=row.user, n=int(x))",
        "what is chosen here is sometimes an integer",
    ),
    (
        "x = (row.a or False)\nout.emit(user=row.user, n=int(x))",
        "what is chosen here is sometimes an integer",
    ),
    ("x = max(row.a, 1)", "max() is not compiled"),
    ("raise UnicodeDecodeError('x')", "is not made of a text alone"),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED, ids=[body[:40] for body, _ in REFUSED])
def test_what_is_not_compiled_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    monkeypatch.setenv("PENSTOCK_COMPILED", "1")
    text = textwrap.dedent(
        """
        import pyarrow as pa
        import penstock as ps

        def other(x):
            return x

        def max(a, b):
            return a

        @ps.compiled
        class Function(ps.KeyedProcessFunction):
            total = ps.ValueState("total", pa.int64())
            names = ps.ValueState("names", pa.string())

            def process(self, row, ctx, out):
        """
    ) + textwrap.indent(body, " " * 8)
    path = tmp_path / "written.py"
    path.write_text(text + "\n")
    names: dict[str, Any] = {"__name__": "written"}
    import linecache

    linecache.checkcache(str(path))
    exec(compile(text + "\n", str(path), "exec"), names)
    env = ps.Environment(parallelism=1)
    keyed = env.from_arrow(SCHEMA.empty_table()).key_by("user")
    with pytest.raises(ps.JobRejected) as refused:
        keyed.process(names["Function"](), schema={"user": "string", "n": "int64"})
    message = str(refused.value)
    assert re.search(
        reason.replace("(", r"\(").replace(")", r"\)") if "|" not in reason else reason, message
    ), message
    (line,) = re.findall(r"line (\d+):", message)
    assert "written.py" in message
    assert 17 <= int(line) <= 17 + body.count("\n") + 1, message


def test_what_is_declared_wrongly() -> None:
    with pytest.raises(ps.JobRejected, match="is no class derived from"):
        ps.compiled(int)  # type: ignore[type-var]
    with pytest.raises(ps.JobRejected, match="is given its states"):
        ps.compiled()
    with pytest.raises(ps.JobRejected, match="takes \\(row, state, out\\)"):
        ps.compiled(total=ps.ValueState("total", pa.int64()))(lambda row: None)
    names: dict[str, Any] = {}
    exec("def f(row, state, out):\n    pass\n", names)
    with pytest.raises(ps.JobRejected, match="the source of f is not there"):
        ps.compiled(total=ps.ValueState("total", pa.int64()))(names["f"])
