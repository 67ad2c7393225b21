"""The one session of a Spark driver: started when a stage first needs it. Imports pyspark, so only the driver has it."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from penstock.errors import TaskFailure
from taskmanager.processes.exit_cause import log_tail
from taskmanager.spark.checked_batches import checked_batches, checked_frames
from taskmanager.spark.connect_address import with_session
from taskmanager.spark.failure_text import without_jvm
from taskmanager.spark.session_note_store import forget_session, note_session

DRIVER_LOG = "driver.log"
"""Of the driver's directory: what the process and its JVM say."""

_EXIT_S = 2.0
_CHECKED = "__penstock_checks__"
_OF_CONNECT = {
    "grpc_status": "grpcio-status",
    "google.rpc": "googleapis-common-protos",
    "zstandard": "zstandard",
    "pandas": "pandas",
}
"""What the client of Spark Connect imports: without one of these it may end the process without a word."""


class SparkSessions:
    """Starts the session and ends it.

    Args:
        directory: of the driver's own files.
        code_paths: directories of the job's modules.
        session_id: of the session on a server of Spark Connect.
        on_jvm_end: called from another thread when the JVM has ended: calls into it may never come back.
    """

    def __init__(
        self,
        directory: Path,
        code_paths: list[str],
        session_id: str,
        on_jvm_end: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._on_jvm_end = on_jvm_end
        self._code_paths = code_paths
        self._session_id = session_id
        self._lock = threading.Lock()
        self._session: Any = None
        self._is_remote = False

    def get(self, settings: Mapping[str, str]) -> Any:
        """The session, for the calling thread; settings count where it is not there yet.

        Raises:
            TaskFailure: it cannot be started.
        """
        with self._lock:
            if self._session is None:
                self._is_remote = bool(settings.get("spark.remote"))
                self._session = self._remote(settings) if self._is_remote else self._own(settings)
                _check_returned_columns(type(self._session.range(0)))
            if not self._is_remote and self.has_jvm() and not self.is_stopped():
                self._activate()
            return self._session

    def _activate(self) -> None:
        """Its settings count in those threads of the JVM where it is the active one; each thread of ours has its own there."""
        session = self._session
        of_jvm = session._get_j_spark_session_class(session._jvm)
        of_jvm.setActiveSession(session._jsparkSession)

    def _own(self, settings: Mapping[str, str]) -> Any:
        # Python on the executors finds the job's modules here, or in the archive where it runs elsewhere.
        paths = [*self._code_paths, *filter(None, [os.environ.get("PYTHONPATH")])]
        if paths:
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", settings["spark.driver.bindAddress"])
        os.environ.pop("SPARK_HOME", None)  # another Spark than the one that is imported here
        from pyspark.sql import SparkSession

        builder = SparkSession.builder
        for key, value in settings.items():
            builder = builder.config(key, value)
        try:
            session = builder.getOrCreate()
        except Exception as error:
            if type(error).__name__ == "PySparkRuntimeError" or self._has_ended(self._jvm(), error):
                raise self._without_start(error) from error
            raise
        jvm = self._jvm()
        if jvm is not None:
            threading.Thread(target=self._watch, args=(jvm,), name="jvm", daemon=True).start()
        session.sparkContext.setLogLevel("WARN")
        if not settings["spark.master"].startswith("local"):
            for archive in self._archives():
                session.sparkContext.addPyFile(archive)
        return session

    def _without_start(self, error: Exception) -> TaskFailure:
        """What the JVM has said goes to the log of the process."""
        tail = without_jvm(log_tail(self._directory / DRIVER_LOG)).strip()
        return TaskFailure(
            f"Spark's JVM did not start: {type(error).__name__}: {error}"
            + (f"; its log ends with:\n{tail}" if tail else "")
        )

    def _remote(self, settings: Mapping[str, str]) -> Any:
        missing = [package for module, package in _OF_CONNECT.items() if not _is_there(module)]
        if missing:
            message = (
                f"spark.remote needs packages that are not installed on this TaskManager: {', '.join(missing)}. "
                "Install penstock[connect] there"
            )
            raise TaskFailure(message, user_traceback=message)  # no restart installs them
        from pyspark.sql import SparkSession

        address = with_session(settings["spark.remote"], self._session_id)
        note_session(self._directory, address)
        session = SparkSession.builder.remote(address).create()
        for key, value in settings.items():
            if key == "spark.remote":
                continue
            if not session.conf.isModifiable(key):
                message = f"{key} cannot be set with spark.remote: the server of Spark Connect has been started with its own"
                raise TaskFailure(message, user_traceback=message)
            session.conf.set(key, value)
        archives = self._archives()
        if archives:
            session.addArtifacts(*archives, pyfile=True)
        return session

    def _archives(self) -> list[str]:
        """The job's modules as files that can be sent."""
        return [
            shutil.make_archive(str(self._directory / f"code-{number}"), "zip", path)
            for number, path in enumerate(self._code_paths)
        ]

    @property
    def is_started(self) -> bool:
        """Whether there is a session, or was."""
        return self._session is not None

    def is_stopped(self) -> bool:
        """Whether somebody has stopped the session."""
        session = self._session
        if session is None:
            return False
        if self._is_remote:
            return bool(session.is_stopped)
        context = session._sc
        return context._jsc is None or bool(self.has_jvm() and context._jsc.sc().isStopped())

    def has_jvm(self) -> bool:
        """Whether the JVM runs; True where there is none of ours."""
        if self._session is None or self._is_remote:
            return True
        jvm = self._jvm()
        return jvm is None or jvm.poll() is None

    def has_lost_jvm(self, error: BaseException) -> bool:
        """Whether the JVM has ended, as an error of a call into it may say a moment before the process is gone."""
        jvm = self._jvm() if self._session is not None and not self._is_remote else None
        return self._has_ended(jvm, error)

    def _has_ended(self, jvm: subprocess.Popen[bytes] | None, error: BaseException) -> bool:
        if jvm is None:
            return False
        if isinstance(error, ConnectionError) or type(error).__name__ == "Py4JNetworkError":
            with suppress(subprocess.TimeoutExpired):
                jvm.wait(_EXIT_S)
        return jvm.poll() is not None

    def _jvm(self) -> subprocess.Popen[bytes] | None:
        from pyspark import SparkContext

        return getattr(SparkContext._gateway, "proc", None)

    def _watch(self, jvm: subprocess.Popen[bytes]) -> None:
        jvm.wait()
        self._on_jvm_end()

    @contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Within it, what this thread has Spark do runs under a tag."""
        # A session of the JVM's own knows the tags of the calling thread alone.
        owner = self._session if self._is_remote else self._session.sparkContext
        add, remove = (
            (owner.addTag, owner.removeTag)
            if self._is_remote
            else (owner.addJobTag, owner.removeJobTag)
        )
        add(tag)
        try:
            yield
        finally:
            if self.has_jvm() and not self.is_stopped():
                remove(tag)

    def interrupt(self, tag: str) -> None:
        """Ends what runs under a tag."""
        if self._session is None or not self.has_jvm() or self.is_stopped():
            return
        if self._is_remote:
            self._session.interruptTag(tag)
        else:
            self._session.sparkContext.cancelJobsWithTag(tag)

    def release(self) -> None:
        """Removes the files that Spark keeps for what nobody refers to any more, soon."""
        if self._session is None or self._is_remote or not self.has_jvm() or self.is_stopped():
            return
        gc.collect()  # of Python, which holds on to objects of the JVM
        with suppress(Exception):  # the JVM ends, or somebody stops the session
            self._session._jvm.System.gc()

    def stop(self) -> None:
        """Ends the session, and what it has under way."""
        if self._session is not None and self.has_jvm():
            if self._is_remote:
                self._session.interruptAll()
            self._session.stop()
            forget_session(self._directory)
            self._end_jvm()

    def _end_jvm(self) -> None:
        """The JVM removes its directories as it ends, which it does when its input has."""
        jvm = self._jvm()
        if not self._is_remote and jvm is not None and jvm.stdin is not None:
            jvm.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                jvm.wait(_EXIT_S)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _check_returned_columns(frames: Any) -> None:
    """Has ``mapInArrow`` and ``mapInPandas`` of a class of DataFrames look at what functions return."""
    from pyspark.sql.pandas.types import to_arrow_schema

    def of_batches(function: Any, schema: Any) -> Any:
        return checked_batches(function, to_arrow_schema(schema, timezone="UTC"))

    def of_frames(function: Any, schema: Any) -> Any:
        return checked_frames(function, schema.names)

    for name, check in (("mapInArrow", of_batches), ("mapInPandas", of_frames)):
        original = getattr(frames, name)
        if not hasattr(original, _CHECKED):
            checking = _checking(original, check)
            setattr(checking, _CHECKED, True)
            setattr(frames, name, checking)


def _checking(original: Any, check: Callable[[Any, Any], Any]) -> Any:
    @wraps(original)
    def mapped(frame: Any, func: Any, schema: Any, *others: Any, **options: Any) -> Any:
        # What was declared is Spark's to say: it has the grammar of schemas that are texts.
        declared = original(frame, func, schema, *others, **options).schema
        return original(frame, check(func, declared), schema, *others, **options)

    return mapped
