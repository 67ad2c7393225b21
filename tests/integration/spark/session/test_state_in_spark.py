"""Aim: Spark reads every state as it is, and what it gives back is written as it was.

Method: a real session. What ``open_state`` reads without Spark, which has tests of its own, is the oracle; what goes
through Spark and back is compared as it is stored, and a job goes on from it.
"""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import Observation, SparkSession
from pyspark.sql.functions import count, lit

import penstock as ps
from penstock.state_tables.spark_rows_client import frame_batches, without_idle_limit
from penstock.state_tables.spark_state_client import data_source
from tests.integration.conftest import NewEnvironment
from tests.integration.spark.conftest import IN_ALL
from tests.support.golden_job import build, result
from tests.support.jobs import DEADLINE_S

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark.*"),
]

GOLDEN = Path(__file__).parents[3] / "golden"
NOT_TABLES = {"watermark", "arrived", "bucket_ms"}
FILTERS = "spark.sql.python.filterPushdown.enabled"


def unpacked(name: str, target: Path) -> Path:
    with tarfile.open(max(GOLDEN.glob(f"runs-*/{name}.tar.gz"))) as archive:
        archive.extractall(target, filter="data")
    return target


def tables(state: ps.StateTables) -> list[tuple[str, str]]:
    return [
        (operator.uid, one.name)
        for operator in state.operators
        for one in operator.states
        if one.name not in NOT_TABLES
    ]


def counted(table: pa.Table) -> Counter[str]:
    return Counter(map(str, table.to_pylist()))


def stored(path: Path | str) -> dict[tuple[str, str], Counter[str]]:
    state = ps.open_state(path)
    return {(uid, name): counted(state.read(uid, name)) for uid, name in tables(state)}


@pytest.mark.parametrize(
    "name", ["hashmap-canonical", pytest.param("rocksdb-native", marks=IN_ALL)]
)
def test_spark_reads_what_there_is(spark: SparkSession, name: str, tmp_path: Path) -> None:
    path = unpacked(name, tmp_path)
    state = ps.open_state(path)
    for uid, one in tables(state):
        wanted = state.read(uid, one)
        found = ps.read_state(spark, path, uid, one).toArrow()
        assert found.schema.names == wanted.schema.names
        found = found.cast(
            pa.schema([pa.field(f.name, f.type) for f in wanted.schema])
        )  # what Spark has other types for
        assert counted(found) == counted(wanted), (uid, one)


def test_a_job_goes_on_from_what_went_through_spark(
    spark: SparkSession, new_env: NewEnvironment, tmp_path: Path
) -> None:
    path = unpacked("rocksdb-native", tmp_path / "kept")
    frames: dict[str, dict[str, Any]] = {}
    for uid, name in tables(ps.open_state(path)):
        if "splits" not in name:
            frames.setdefault(uid, {})[name] = ps.read_state(spark, path, uid, name)
    written = ps.write_savepoint(tmp_path / "written", frames, base=path)
    assert stored(written) == stored(path)
    config = {"execution.checkpointing.dir": str(tmp_path / "checkpoints")}
    other = unpacked("hashmap-canonical", tmp_path / "other")
    for output, start in (("again", Path(written)), ("wanted", other)):
        build(env := new_env(3, config), tmp_path / output)
        handle = env.submit("golden", from_savepoint=start)
        assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert result(tmp_path / "again") == result(tmp_path / "wanted")


NESTED = pa.struct(
    [
        ("t", pa.list_(pa.timestamp("ms", "Europe/Berlin"))),
        ("m", pa.map_(pa.timestamp("us", "Asia/Tokyo"), pa.duration("ms"))),
        *(("x", pa.list_(pa.list_(pa.float32(), 2))), ("A", pa.int8()), ("a", pa.int8())),
    ]
)
ONE_OF_EACH: Sequence[tuple[pa.DataType, Any]] = [
    (pa.uint8(), 255),
    (pa.uint64(), 2**64 - 1),
    (pa.int16(), -(2**15)),
    (pa.float32(), 0.1),
    (pa.float64(), float("inf")),
    (pa.bool_(), True),
    (pa.string(), "\x00 ü"),
    (pa.binary(), b"\xff\x00"),
    (pa.date32(), 1),
    (pa.timestamp("us", "UTC"), 1_700_000_000_123_456),
    (pa.timestamp("ms"), 1_700_000_000_123),
    (pa.duration("ms"), 5),
    (pa.time64("us"), 86_399_999_999),
    (pa.decimal128(38, 3), Decimal("12345678901234567890123456789012345.678")),
    (pa.list_(pa.int64()), [1, None, 2**60]),
    (pa.map_(pa.string(), pa.uint32()), [("a", 2**32 - 1)]),
    (pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))]), {"a": 1, "b": ["x", None]}),
    (NESTED, {"t": [None, 1_729_990_800_000], "m": [(0, 5)], "x": [[0.5, None]], "A": 1, "a": 2}),
    (pa.float64(), float("nan")),
]


def test_values_of_every_type_come_back_as_they_were(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = {f"s{n}": ps.ValueState(f"s{n}", kind) for n, (kind, _) in enumerate(ONE_OF_EACH)}
    declared["text"] = ps.ValueState("text", ps.MSGPACK)
    declared["bytes"] = ps.ValueState("bytes", ps.PICKLE)

    def process(self: Any, row: Any, ctx: Any, out: Any) -> None:
        """Keeps nothing more."""

    kind = type("Each", (ps.KeyedProcessFunction,), {**declared, "process": process})
    env = ps.Environment(parallelism=1)
    rows = env.from_rows([{"k": 1}], schema={"k": "uint32"}).uid("rows")
    rows.key_by("k").process(kind(), schema={"k": "uint32"}).uid("each").discard()
    keys = pa.array([0, 2**32 - 1, None], pa.uint32())
    values = {f"s{n}": pa.array([value] * 3, kind) for n, (kind, value) in enumerate(ONE_OF_EACH)}
    values["text"] = pa.array(['{"$tuple": [1, "é"]}', "null", "[]"])
    values["bytes"] = pa.array([pickle.dumps(n) for n in range(3)])
    given = {name: pa.table({"k": keys, "value": column}) for name, column in values.items()}
    first = ps.write_savepoint(tmp_path / "first", {"each": given}, job=env)
    frames = {name: ps.read_state(spark, first, "each", name) for name in given}
    second = ps.write_savepoint(tmp_path / "second", {"each": frames}, job=env)
    assert stored(second) == stored(first)
    with monkeypatch.context() as patch:  # as if its executors were elsewhere
        patch.setattr("penstock.state_tables.spark_rows_client._is_local", lambda frame: False)
        few = {name: frames[name] for name in ("s1", "s9", "s16", "text")}
        third = ps.write_savepoint(tmp_path / "third", {"each": few}, job=env)
    assert (
        stored(third).items() >= {("each", one): stored(first)["each", one] for one in few}.items()
    )
    assert {name for _, name in stored(first)} >= given.keys()
    types = dict(frames["s1"].dtypes), dict(frames["s9"].dtypes)
    assert types[0] == {"k": "bigint", "value": "decimal(20,0)", "key_group": "int"}
    assert types[1]["value"] == "timestamp"


def test_filters_on_one_frame_do_not_reach_into_one_another(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = unpacked("hashmap-canonical", tmp_path)
    groups = ps.open_state(path).read("states", "sums")["key_group"].to_pylist()
    low, high = (sum(group < 30 for group in groups), sum(group >= 100 for group in groups))
    assert 0 < low < low + high < len(groups)
    spark.conf.set(FILTERS, "true")
    try:
        frame = ps.read_state(spark, path, "states", "sums")
        first, last = frame.where("key_group < 30"), frame.where("key_group >= 100")
        assert [one.count() for one in (first, frame)] == [low, len(groups)]
        assert first.union(last).count() == low + high
    finally:
        spark.conf.unset(FILTERS)


def test_a_limit_of_batches_is_lifted_where_it_cuts_nothing(spark: SparkSession) -> None:
    def limit_of(frame: Any) -> str:
        return str(frame._jdf.sparkSession().conf().get(limit))

    limit, rows = (
        "spark.sql.execution.arrow.maxBytesPerBatch",
        "spark.sql.execution.arrow.maxRecordsPerBatch",
    )
    own = spark.conf.get(limit)
    plain = spark.range(30_000).selectExpr("id", "cast(id as decimal(9, 2)) d", "id % 2 = 0 b")
    lifted = without_idle_limit(plain)
    assert limit_of(lifted) == str(2**31 - 1)
    assert spark.conf.get(limit) == limit_of(plain) == own
    batches = list(frame_batches(plain))
    assert pa.Table.from_batches(batches).sort_by("id") == plain.toArrow().sort_by("id")
    assert max(batch.num_rows for batch in batches) == int(str(spark.conf.get(rows)))
    for kept in ("cast(cast(id as string) as binary) t", "array(id) t"):
        assert without_idle_limit(frame := plain.selectExpr(kept)) is frame
    for key, value in ((limit, "100kb"), (rows, "0")):  # it cuts then
        kept = spark.conf.get(key)
        spark.conf.set(key, value)
        try:
            assert without_idle_limit(plain) is plain
        finally:
            spark.conf.set(key, str(kept))

    observed = plain.observe(seen := Observation(), count(lit(1)).alias("rows"))
    assert sum(batch.num_rows for batch in frame_batches(observed)) == 30_000
    assert seen.get == {"rows": 30_000}

    named = plain.selectExpr("cast(id as string) t", "id n").limit(3)
    for names in (["a.b", "a"], ["a", "A"], ["a`c", "a"], ["a", "a"]):
        found = pa.Table.from_batches(list(frame_batches(named.toDF(*names))))
        assert (found.schema.names, found[1].to_pylist()) == (names, [0, 1, 2])

    class Older:
        """What a Spark is like that has none of this."""

        schema = plain.schema
        sparkSession = object()  # noqa: N815

    older: Any = Older()
    assert without_idle_limit(older) is older


@pytest.mark.parametrize("long", ["''", "null", "repeat('ä', 1 << 15)"])
def test_texts_come_without_a_limit_of_bytes_but_where_one_is_long(
    spark: SparkSession, long: str
) -> None:
    texts = spark.range(0, 20_001, 1, 2).selectExpr(
        "id", f"if(id = 20000, {long}, cast(id as string)) t"
    )
    assert without_idle_limit(texts) is not texts
    found = pa.Table.from_batches(list(frame_batches(texts)))
    assert found.sort_by("id").to_pydict() == texts.toArrow().sort_by("id").to_pydict()


def test_key_groups_that_are_not_wanted_are_left_unread(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = unpacked("hashmap-canonical", tmp_path)
    options = {"path": str(path), "uid": "states", "state": "sums"}
    for more, expected in (({"key_groups": "0-29"}, [(0, 29)]), ({}, [(0, 63), (64, 127)])):
        source = data_source()({**options, **more})
        reader = source.reader(source.schema())
        ranges = [part[1:3] for task in reader.partitions() for part in task.value]
        assert ranges == expected

    state = ps.open_state(path)
    assert state.read("states", "sums", key_groups=range(30)).num_rows
    for wanted in (range(30), range(60, 70), range(0)):
        expected_rows = counted(state.read("states", "sums", key_groups=wanted))
        found = ps.read_state(spark, path, "states", "sums", key_groups=wanted).toArrow()
        assert counted(found) == expected_rows
    with pytest.raises(ps.StateError, match=r"key_groups=3 is no range"):
        ps.read_state(spark, path, "states", "sums", key_groups=3)  # type: ignore[arg-type]
    with pytest.raises(
        ps.StateError, match=r"has key-groups 0 to 127: none is in range\(500, 600\)"
    ):
        ps.read_state(spark, path, "states", "sums", key_groups=range(500, 600))
    ps.register(spark)
    reader = spark.read.format("penstock-state").options(**options)
    with pytest.raises(PySparkException, match="the first and the last of them"):
        reader.option("key_groups", "3").load()


def test_a_checkpoint_that_was_retired_is_told(spark: SparkSession, tmp_path: Path) -> None:
    path = unpacked("hashmap-checkpoint", tmp_path)
    frame = ps.read_state(spark, path, "states", "sums")
    shutil.rmtree(path)
    path.mkdir()
    with pytest.raises(
        PySparkException, match=first_says(r"execution\.checkpointing\.num-retained")
    ):
        frame.count()


def test_wrong_asking_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    path = unpacked("hashmap-canonical", tmp_path / "base")
    with pytest.raises(ps.StateError, match=r"no state 'sum'.*'sums'"):
        ps.read_state(spark, path, "states", "sum")
    with pytest.raises(ps.StateError, match="read without path"):
        ps.read_state(spark, "", "states", "sums")
    ps.register(spark)
    reader = spark.read.format("penstock-state").option("uid", "states")
    frame = ps.read_state(spark, path, "states", "sums")
    twice = {"states": {"sums": frame.unionAll(frame)}}
    with pytest.raises(ps.StateError, match=r"k=\d+ is there twice"):
        ps.write_savepoint(tmp_path / "twice", twice, base=path)
    renamed = {"states": {"sums": frame.withColumnRenamed("value", "v")}}
    with pytest.raises(ps.StateError, match="without 'value' and with unknown 'v'"):
        ps.write_savepoint(tmp_path / "twice", renamed, base=path)
    assert not [*(tmp_path / "twice").rglob("*.*")]
    with pytest.raises(PySparkException, match=first_says("read without state")):
        reader.load(str(path))
    with pytest.raises(PySparkException, match=first_says(r"no state 'sum'.*'sums'")):
        reader.option("state", "sum").load(str(path))
    with pytest.raises(PySparkException, match=first_says("a schema that it has not")):
        reader.option("state", "sums").schema("k long").load(str(path)).count()


def first_says(words: str) -> str:
    """An error of Spark's whose first line has the words."""
    return rf"^.*StateError: .*{words}"


def test_an_executor_without_penstock_says_what_to_do(tmp_path: Path) -> None:
    source = data_source()({"path": str(unpacked("hashmap-canonical", tmp_path / "kept"))})
    source.options.update(uid="states", state="sums")
    reader = source.reader(source.schema())
    sent = CloudPickleSerializer().dumps((reader, reader.partitions()[0]))
    (tmp_path / "sent").write_bytes(sent)
    code = (
        "import pickle, sys; sys.modules['penstock'] = None\n"
        "reader, part = pickle.load(open(sys.argv[1], 'rb'))\n"
        "try: reader.read(part)\n"
        "except RuntimeError as error: print(error)"
    )
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path / "sent"],
        check=True,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    ).stdout
    assert f"install penstock {ps.__version__} for the Python that PYSPARK_PYTHON" in told


def test_a_job_without_spark_imports_nothing_of_it(address: str) -> None:
    code = (
        "import sys, penstock as ps\n"
        "env = ps.Environment(sys.argv[1], parallelism=1)\n"
        "env.from_rows([{'a': 1}]).discard()\n"
        "assert env.execute('plain').status == 'FINISHED'\n"
        "assert not {'pyspark', 'py4j'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, address], check=True, timeout=DEADLINE_S)
