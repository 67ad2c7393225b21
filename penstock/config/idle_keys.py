"""Keys that have no effect as long as another one has a certain value.

They are told of and not refused: a file may be shared by daemons, clients and jobs that set the other key differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class _Rule:
    """When keys have no effect.

    Attributes:
        keys: those keys; one that ends in a dot stands for all that begin with it.
        idle_at: the keys that decide -> the values with which they leave the former without effect; all of them have to.
        is_of_job: jobs decide, each for itself, and where they say nothing, the cluster may have said it.
        is_of_client: it is a matter of clients as well as of daemons.
    """

    keys: tuple[str, ...]
    idle_at: Mapping[str, tuple[str, ...]]
    is_of_job: bool = False
    is_of_client: bool = False

    def is_about(self, key: str) -> bool:
        return key not in self.idle_at and any(
            key.startswith(one) if one.endswith(".") else key == one for one in self.keys
        )

    def is_met(self, values: Mapping[str, str]) -> bool:
        return all(values.get(key) in idle for key, idle in self.idle_at.items())


def _restart_strategies() -> Iterable[_Rule]:
    names = {
        "fixed-delay": ("fixed-delay", "fixeddelay"),
        "exponential-delay": ("exponential-delay", "exponentialdelay"),
        "failure-rate": ("failure-rate", "failurerate"),
    }
    spelled = {name for names in names.values() for name in names} | {"none", "off", "disable"}
    for name, own in names.items():
        idle = tuple(sorted(spelled.difference(own)))
        yield _Rule((f"restart-strategy.{name}.",), {"restart-strategy.type": idle}, is_of_job=True)


_INTERNAL: Final = "security.ssl.internal."
_RULES: Final = (
    _Rule(("high-availability.",), {"high-availability.type": ("none",)}),
    _Rule(
        ("high-availability.zookeeper.client.credentials-file",),
        {"high-availability.zookeeper.client.auth": ("none",)},
    ),
    _Rule((f"{_INTERNAL}cert", f"{_INTERNAL}key"), {f"{_INTERNAL}enabled": ("false",)}),
    _Rule(
        ("security.ssl.client.ca",),
        {"security.ssl.client.enabled": ("false",)},
        is_of_client=True,
    ),
    _Rule(
        (f"{_INTERNAL}ca", "security.ssl.verify-hostname"),
        {f"{_INTERNAL}enabled": ("false",), "security.ssl.client.enabled": ("false",)},
    ),
    _Rule(("traces.reporter.otel.",), {"traces.reporter.type": ("none",)}),
    *_restart_strategies(),
    _Rule(
        ("execution.batch.speculative.enabled",),
        {"execution.runtime-mode": ("streaming",)},
        is_of_job=True,
    ),
    _Rule(("execution.exchange.default",), {"execution.runtime-mode": ("batch",)}, is_of_job=True),
    _Rule(
        ("slow-task-detector.",),
        {"execution.batch.speculative.enabled": ("false",)},
        is_of_job=True,
    ),
    _Rule(
        ("execution.checkpointing.min-pause",),
        {"execution.checkpointing.interval": ("0",)},
        is_of_job=True,
    ),
    _Rule(
        ("execution.checkpointing.jobmanager.max-size",),
        {"execution.checkpointing.storage": ("filesystem",)},
        is_of_job=True,
    ),
)


def idle_keys(said: Mapping[str, str], defaults: Mapping[str, str], *, of_job: bool) -> list[str]:
    """What is said without effect, one sentence for each rule.

    Args:
        said: the keys that are set, with their values.
        defaults: those of all keys.
        of_job: said of a job, by a client, and not of a daemon.
    """
    given = [key for key, value in said.items() if value != defaults.get(key)]
    told = []
    for rule in _RULES:
        keys = sorted(filter(rule.is_about, given))
        is_asked = rule.is_of_job or rule.is_of_client if of_job else not rule.is_of_job
        # A job that says nothing has what the cluster says.
        values = said if rule.is_of_job else {**defaults, **said}
        if keys and is_asked and rule.is_met(values):
            because = " and ".join(f"{key} is {values[key]}" for key in rule.idle_at)
            told.append(f"{', '.join(keys)}: without effect, since {because}")
    return told
