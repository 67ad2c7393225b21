"""What has gone wrong in Spark, in a few lines: its cause first, without the JVM's frames."""

from __future__ import annotations

import re

_LINES_MAX = 20
_JVM = re.compile(r"^\s*(at [\w$.<>/@]+\(|\.\.\. \d+ more|JVM stacktrace:|Driver stacktrace:)")
_CAUSED = re.compile(r"^\s*Caused by: ([\w.$]+(?:Exception|Error|Throwable)): ?(.*)$", re.MULTILINE)
_OF_SPARK = re.compile(
    r"^[: ]*(?:Caused by: )?(org\.apache\.spark[\w.$]+): (\[[A-Z].*)$", re.MULTILINE
)
_PYTHON = re.compile(
    r"Traceback \(most recent call last\):\n(?:.*\n)*?(\w[\w.]*: .*|\w[\w.]*)$", re.MULTILINE
)
_OF_MEMORY = ", which ran out of memory (execution.spark.driver-memory is the heap in local mode)"
_OF_JARS = ", which lacks a jar (spark.jars: paths on the TaskManager; spark.jars.packages: names in Maven)"
_LACKS_JAR = re.compile(
    r"^[: ]*java\.(lang\.ClassNotFoundException: |sql\.SQLException: No suitable driver)",
    re.MULTILINE,
)
_DISK_FULL = ("No space left on device", "Disk quota exceeded")
_OWN_WORDS = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]")


def without_jvm(text: str) -> str:
    """A text of Spark's without frames of the JVM, and not longer than a screen.

    Example: frames go.
        >>> without_jvm("boom\\n  at org.apache.Foo(Foo.java:1)\\nDriver stacktrace:")
        'boom'
    """
    lines = [line.rstrip() for line in text.splitlines() if not _JVM.match(line)]
    lines = [line for line in lines if line]
    if len(lines) > _LINES_MAX:
        half = _LINES_MAX // 2
        left_out = f"... ({len(lines) - 2 * half} lines left out) ..."
        lines = [*lines[:half], left_out, *lines[-half:]]
    return "\n".join(lines)


def root_cause(text: str) -> str:
    """What the innermost exception says: of a function in Python, else of the JVM; else all of it."""
    python = _PYTHON.findall(text)
    if python:
        return str(python[-1]).strip()
    caused = _CAUSED.findall(text)
    if caused:
        name, message = caused[-1]
        own = _OF_SPARK.findall(text)
        if own and name.endswith(
            "ClassNotFoundException"
        ):  # what it was to be is what the user has said
            name, message = own[-1]
        short = str(name).rpartition(".")[2]
        return f"{short}: {message}".strip().rstrip(":")
    return without_jvm(text)


def full_disk(text: str, places: str) -> str:
    """What to add where a text says that a disk is full, "" = it does not.

    Args:
        places: what is written to.

    Example: Spark says no path.
        >>> full_disk("java.io.IOException: No space left on device", "/tmp/a")
        ' (No space left on device, of the disk of /tmp/a: free space there, or use another directory)'
    """
    found = next((words for words in _DISK_FULL if words in text), "")
    return (
        f" ({found}, of the disk of {places}: free space there, or use another directory)"
        if found
        else ""
    )


def failure_message(operator: str, function: str, kind: str, text: str, places: str = "") -> str:
    """One stage's failure as a person reads it.

    Args:
        function: how the user knows it.
        kind: class of the exception.
        text: all that it says.
        places: what the stage writes to.

    Example: what to raise is named.
        >>> failure_message("sum", "total", "Py4JJavaError", "java.lang.OutOfMemoryError: Java heap space")[:52]
        "operator 'sum': total failed on Spark, which ran out"
    """
    cause = root_cause(text)
    whole = without_jvm(text)
    head = f"operator {operator!r}: {function} failed on Spark{_hint(text, places)}: "
    if cause == whole:
        return f"{head}{kind}: {whole}"
    return f"{head}{cause}\n{kind}: {whole}"


def _hint(text: str, places: str) -> str:
    if "java.lang.OutOfMemoryError" in text:
        return _OF_MEMORY
    if _LACKS_JAR.search(text):
        return _OF_JARS
    return full_disk(text, places)


def is_of_user(kind: str, text: str) -> bool:
    """Whether the user's code or data have failed, and would again, and not a part of Spark."""
    if kind in _USER_KINDS or "org.apache.spark.api.python.PythonException" in text:
        return True
    if _LACKS_JAR.search(text):
        return True
    conditions = _OWN_WORDS.findall(text)
    return any(condition.startswith(_USER_CONDITIONS) for condition in conditions)


_USER_KINDS = frozenset(
    {
        "AnalysisException",
        "ParseException",
        "PythonException",
        "ArithmeticException",
        "ArrayIndexOutOfBoundsException",
        "DateTimeException",
        "IllegalArgumentException",
        "NumberFormatException",
        "PySparkAttributeError",
        "PySparkNotImplementedError",
        "PySparkTypeError",
        "PySparkValueError",
        "PickleException",
        "UnsupportedOperationException",
        "SparkNoSuchElementException",
    }
)
_USER_CONDITIONS = (
    "ARITHMETIC_OVERFLOW",
    "CAST_",
    "DATA_SOURCE_NOT_FOUND",
    "DIVIDE_BY_ZERO",
    "INVALID_",
    "NUMERIC_",
    "UNRESOLVED_",
    "UDTF_",
    "DUPLICATED_MAP_KEY",
)
