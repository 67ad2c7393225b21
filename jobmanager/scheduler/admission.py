"""Whether the cluster can run a job's code, decided before anything starts.

Pickles are only readable where they were made for: the Python minor version and the cloudpickle
version of the client must be those of every TaskManager. Requirements (PEP 508) must be installed
there. A cluster without TaskManagers admits every job; the TaskManagers that later give it slots are
checked then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from penstock.errors import JobRejected, ProtocolMismatch, StreamError

JAVA_MIN = 17
"""Of the Spark that belongs to this version."""


@dataclass(frozen=True, slots=True)
class TaskManagerFacts:
    """What a TaskManager says of itself.

    Attributes:
        packages: installed distributions, "name==version".
        java_version: "17.0.15", "" where there is no Java.
        version: of Penstock.
    """

    taskmanager_id: str
    python_version: str
    cloudpickle_version: str
    packages: tuple[str, ...] = ()
    java_version: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class CodeStamp:
    """What a job's code needs; "" where it ships no pickles.

    Attributes:
        needs_java: slots start Spark for it.
    """

    python_version: str = ""
    cloudpickle_version: str = ""
    requirements: tuple[str, ...] = ()
    needs_java: bool = False


def admission_problem(
    stamp: CodeStamp, taskmanagers: Sequence[TaskManagerFacts]
) -> StreamError | None:
    """The first reason against running this code on these TaskManagers; None = there is none.

    Example: pickles are readable where their Python is.
        >>> old, new = TaskManagerFacts("tm-1", "3.11.9", "3.1.0"), TaskManagerFacts("tm-2", "3.12.1", "3.1.0")
        >>> admission_problem(CodeStamp("3.11.4"), [old])
        >>> print(admission_problem(CodeStamp("3.11.4"), [old, new]))
        the job was built with Python 3.11, TaskManager tm-2 runs 3.12: submit it with Python 3.12
    """
    try:
        requirements = [Requirement(text) for text in stamp.requirements]
    except InvalidRequirement as error:
        return JobRejected(f"a requirement is malformed: {error}")
    for facts in taskmanagers:
        problem = _stamp_problem(stamp, facts)
        if problem is not None:
            return problem
        if stamp.needs_java and _java_major(facts.java_version) < JAVA_MIN:
            return JobRejected(
                f"the job runs on Spark, which needs Java {JAVA_MIN} or newer, and TaskManager {facts.taskmanager_id} "
                f"has {facts.java_version or 'none'}: install it there (Debian: openjdk-17-jre-headless) and set "
                "JAVA_HOME, or name a server of Spark Connect with spark.remote"
            )
        missing = _unmet(requirements, facts)
        if missing:
            return JobRejected(
                f"TaskManager {facts.taskmanager_id} does not meet the job's requirements: "
                f"{'; '.join(missing)}; install them there, or drop them from --requirements"
            )
    return None


def _stamp_problem(stamp: CodeStamp, facts: TaskManagerFacts) -> ProtocolMismatch | None:
    """Whether one TaskManager could not read the job's pickles."""
    ours, theirs = _minor(stamp.python_version), _minor(facts.python_version)
    if ours and ours != theirs:
        return ProtocolMismatch(
            f"the job was built with Python {ours}, TaskManager {facts.taskmanager_id} runs {theirs}: "
            f"submit it with Python {theirs}"
        )
    if stamp.cloudpickle_version and stamp.cloudpickle_version != facts.cloudpickle_version:
        return ProtocolMismatch(
            f"the job was pickled with cloudpickle {stamp.cloudpickle_version}, TaskManager "
            f"{facts.taskmanager_id} has {facts.cloudpickle_version}: install "
            f"cloudpickle=={facts.cloudpickle_version} where the job is submitted"
        )
    return None


def _java_major(version: str) -> int:
    """17 of "17.0.15", 8 of "1.8.0_402", 0 of none."""
    first, _, rest = version.partition(".")
    if first == "1":
        first = rest.partition(".")[0]
    digits = first.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _unmet(requirements: Iterable[Requirement], facts: TaskManagerFacts) -> list[str]:
    installed: dict[str, str] = {}
    for package in facts.packages:
        name, _, version = package.partition("==")
        installed[canonicalize_name(name)] = version
    environment = {"python_version": _minor(facts.python_version)}
    missing = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        version = installed.get(canonicalize_name(requirement.name), "")
        if not version:
            missing.append(f"{requirement} is not installed")
        elif not _satisfies(requirement, version):
            missing.append(f"{requirement} is wanted, {version} is installed")
    return missing


def _satisfies(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        # A version that is no version fits only where any does.
        return not requirement.specifier
