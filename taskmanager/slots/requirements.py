"""What is installed here, and whether it meets what a job asks for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from penstock.errors import JobRejected


def installed_packages() -> dict[str, str]:
    """Canonical name -> version of every installed distribution."""
    return {
        canonicalize_name(distribution.name): distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.name
    }


def check_requirements(
    requirements: Sequence[str], installed: Mapping[str, str], taskmanager_id: str
) -> None:
    """Refuses a job whose requirements are not met.

    Args:
        requirements: PEP 508, "name>=1.2; python_version > '3.10'".
        installed: canonical name -> version.
        taskmanager_id: for the message.

    Raises:
        JobRejected: naming every requirement that is not met, and what there is.
    """
    missing: list[str] = []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise JobRejected(f"requirement {text!r} is malformed: {error}") from error
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = installed.get(canonicalize_name(requirement.name))
        if version is None:
            missing.append(f"{requirement} (not installed)")
        elif not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{requirement} (has {version})")
    if missing:
        raise JobRejected(
            f"TaskManager {taskmanager_id} does not meet the job's requirements: "
            f"{', '.join(missing)}; install them there"
        )
