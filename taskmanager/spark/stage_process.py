"""Does one stage in a session: reads its input, calls the user's function, writes and indexes what comes of it."""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import cloudpickle

from penstock.config.spark_keys import is_local_master
from penstock.errors import TaskFailure
from penstock.rows.spark_types import all_nullable, shown_spark_type, spark_json_of_columns
from taskmanager.spark.failure_text import failure_message, full_disk, is_of_user
from taskmanager.spark.stage_files import write_index, written_output
from taskmanager.spark.stage_messages import RunStage, StageFailed, StageInput
from taskmanager.user_code.user_failure import user_traceback

_DEALT_OUT = {
    # As many files as there are consumers, and more; each is read row group by row group.
    "maxRecordsPerFile": str(1 << 19),
    "parquet.block.size": str(32 << 20),
    "parquet.page.write-checksum.enabled": "true",
}
_NAMED_MAX = 10
_OF_GLOBS = re.compile(r"([\\{}\[\]*?,^])")


def do_stage(session: Any, stage: RunStage) -> None:
    """Does a stage; its output counts when this returns."""
    function = _load(stage)
    arguments = [_frame(session, given) for given in stage.inputs] or [session]
    result = function(*arguments)
    _check_result(result, stage)
    names = [result[_quoted(name)] for name in stage.schema.names]
    writer = result.select(*names).write
    if not stage.is_kept:
        writer = writer.options(**_DEALT_OUT)
    writer.parquet(_uri(stage.output))
    files = written_output(Path(stage.output), is_kept=stage.is_kept)
    write_index(Path(stage.function_file).parent, files)


def failure_of(error: BaseException, stage: RunStage) -> StageFailed:
    """What a stage has failed with."""
    missing = [file for given in stage.inputs for file in given.files if not Path(file).exists()]
    if missing:
        return StageFailed(
            stage.stage_id,
            f"operator {stage.operator!r}: {len(missing)} files of the input of the stage are gone, among them "
            f"{missing[0]}",
        )
    if isinstance(error, TaskFailure):
        return StageFailed(stage.stage_id, str(error), error.user_traceback)
    kind, text = type(error).__name__, str(error)
    where = f"operator {stage.operator!r}: {stage.function_name}"
    if isinstance(error, SystemExit):
        return StageFailed(
            stage.stage_id,
            f"{where} called sys.exit({error.code!r}): it must return a DataFrame, or raise an error",
            user_traceback(error),
        )
    if not type(error).__module__.startswith(("pyspark.", "py4j.")):
        message = f"{where} raised {kind}: {text}{full_disk(text, _places(stage))}"
        return StageFailed(stage.stage_id, message, user_traceback(error))
    message = failure_message(stage.operator, stage.function_name, kind, text, _places(stage))
    trace = _python_part(error) if is_of_user(kind, text) else ""
    return StageFailed(stage.stage_id, message, trace)


def _places(stage: RunStage) -> str:
    """The directories that Spark writes to: which of them is full it does not say."""
    settings = dict(stage.settings)
    if is_local_master(settings.get("spark.master", "")):
        own = f"spark.local.dir ({settings['spark.local.dir']})"
    else:
        own = "Spark's own files on its executors"
    return f"{own} or of its output ({stage.output})"


def _python_part(error: BaseException) -> str:
    """The user's lines that led to it; what Spark says of it is in the message."""
    told = user_traceback(error).splitlines()
    lines = [line for line in told if line.startswith(("Traceback", "  "))]
    return "\n".join([*lines[:40], type(error).__name__])


def _load(stage: RunStage) -> Any:
    try:
        return cloudpickle.loads(Path(stage.function_file).read_bytes())
    except Exception as error:
        raise _wrong(
            f"operator {stage.operator!r}: {stage.function_name} cannot be loaded by the Spark driver: "
            f"{type(error).__name__}: {error}; ship the modules it needs with --py-files, or install them on every "
            "TaskManager"
        ) from error


def _frame(session: Any, given: StageInput) -> Any:
    """The rows of an input, and nothing that their paths might say."""
    from pyspark.sql.types import StructType

    schema = StructType.fromJson(spark_json_of_columns(given.schema))
    reader = session.read.schema(schema).option("recursiveFileLookup", "true")
    # Whatever the job has set for what it reads itself: rows of its own are never left out.
    reader = reader.option("ignoreMissingFiles", "false").option("ignoreCorruptFiles", "false")
    reader = reader.option("datetimeRebaseMode", "CORRECTED")
    return reader.parquet(*(_uri(_OF_GLOBS.sub(r"\\\1", file)) for file in given.files))


def _check_result(result: Any, stage: RunStage) -> None:
    """Whether the function has returned what was declared.

    Raises:
        TaskFailure: it has not.
    """
    from pyspark.sql import DataFrame

    where = f"operator {stage.operator!r}: {stage.function_name} returned"
    if not isinstance(result, DataFrame):
        raise _wrong(f"{where} {_shown_kind(result)}, and not a DataFrame of Spark.{_hint(result)}")
    if result.isStreaming:
        raise _wrong(
            f"{where} a streaming DataFrame, which has no end, and a stage is for whole inputs: spark.read in place of "
            "spark.readStream; what never ends is for Penstock's own sources"
        )
    columns = all_nullable(result.schema.jsonValue())["fields"]
    found = {column["name"]: column["type"] for column in columns}
    wanted = {
        column["name"]: column["type"] for column in spark_json_of_columns(stage.schema)["fields"]
    }
    if len(found) < len(columns):
        raise _wrong(f"{where} a DataFrame that has a column twice: {_shown(columns)}")
    missing, unknown = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    if missing or unknown:
        apart = [("without", missing), ("with", unknown)]
        said = " and ".join(f"{word} {_named(names)}" for word, names in apart if names)
        raise _wrong(
            f"{where} a DataFrame {said}, other than schema= says: change the one or the other"
        )
    other = [
        f"{name!r} is {shown_spark_type(found[name])} and should be {shown_spark_type(kind)}"
        for name, kind in wanted.items()
        if found[name] != kind
    ]
    if other:
        raise _wrong(
            f"{where} columns of other types than schema= says: {'; '.join(other)}. Cast them in the function, or "
            "declare what it returns"
        )


def _named(names: AbstractSet[str]) -> str:
    """Some columns by name, however many there are."""
    shown = sorted(map(repr, names))
    rest = len(shown) - _NAMED_MAX
    return ", ".join(shown[:_NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")


def _shown_kind(result: Any) -> str:
    """The type of a value, with the library that it is of: pandas has a DataFrame, too."""
    kind = type(result)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library == "builtins" else f"a {kind.__name__} of {library}"


def _hint(result: Any) -> str:
    if result is None:
        return " Put return in front of it"
    library = type(result).__module__.partition(".")[0]
    if library in ("pandas", "pyarrow"):
        return f" Hand what {library} has made to spark.createDataFrame(...)"
    return ""


def _wrong(message: str) -> TaskFailure:
    # It is the user's to change: what says so is a traceback.
    return TaskFailure(message, user_traceback=message)


def _shown(columns: list[dict[str, Any]]) -> str:
    return ", ".join(f"{column['name']}: {shown_spark_type(column['type'])}" for column in columns)


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _uri(path: str) -> str:
    return f"file://{path}"
