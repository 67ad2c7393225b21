"""Durations, sizes and the configuration model: every notation, every kind of mistake."""

import pathlib
import re
import traceback
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Configuration, known_keys, parse_override
from penstock.errors import ConfigurationError
from penstock.graph.exchanges import EXCHANGES
from penstock.units import DURATION_MAX_MS, duration_ms, signed_duration_ms, size_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10s", 10_000),
        ("10 s", 10_000),
        ("250ms", 250),
        ("1 min", 60_000),
        ("1.5 h", 5_400_000),
        ("1.1h", 3_960_000),
        ("1.001s", 1001),
        ("2h", 7_200_000),
        ("1 d", 86_400_000),
        ("10000 ms", 10_000),
        ("7", 7),
        (7, 7),
        (0, 0),
        (timedelta(seconds=2), 2000),
    ],
)
def test_durations(text, expected):
    assert duration_ms(text) == expected


@pytest.mark.parametrize(
    "text", ["", "s", "10 parsecs", "-1s", -1, "1us", 0.5, timedelta(microseconds=1), True, None]
)
def test_wrong_durations_say_so(text):
    with pytest.raises(ConfigurationError):
        duration_ms(text)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("9999999999999999h", "longer than 10,000 years"),
        ("9" * 400 + " h", "longer than 10,000 years"),
        (10**400, "longer than 10,000 years"),
        (timedelta.max, "longer than 10,000 years"),
        (float("inf"), "longer than 10,000 years"),
        (float("-inf"), "negative"),
        (float("nan"), "nan is not a number"),
    ],
)
def test_durations_without_end_are_refused(value, reason):
    with pytest.raises(ConfigurationError, match=reason):
        duration_ms(value)
    key = "restart-strategy.fixed-delay.delay"
    with pytest.raises(ConfigurationError, match=rf"{re.escape(key)} = .*{reason}"):
        Configuration.from_mapping({key: value})


@pytest.mark.parametrize("value", ["-9999999999999999h", -(10**400), timedelta.min])
def test_signed_durations_without_end_are_refused(value):
    with pytest.raises(ConfigurationError, match="longer than 10,000 years"):
        signed_duration_ms(value)


def test_the_longest_duration():
    assert duration_ms("3660000 d") == DURATION_MAX_MS
    assert signed_duration_ms("-3660000 d") == -DURATION_MAX_MS
    with pytest.raises(ConfigurationError, match="longer"):
        duration_ms(DURATION_MAX_MS + 1)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("9999999999 tb", "more than 8 EiB"),
        ("9" * 400, "more than 8 EiB"),
        (10**400, "more than 8 EiB"),
        (2**63, "more than 8 EiB"),
        (float("inf"), "more than 8 EiB"),
        (float("nan"), "nan is not a number"),
    ],
)
def test_sizes_without_end_are_refused(value, reason):
    with pytest.raises(ConfigurationError, match=reason):
        size_bytes(value)
    key = "taskmanager.spill.max-size"
    with pytest.raises(ConfigurationError, match=rf"{re.escape(key)} = .*{reason}"):
        Configuration.from_mapping({key: value})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64mb", 64 << 20),
        ("20 kb", 20480),
        ("1g", 1 << 30),
        (5, 5),
        ("5", 5),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_sizes(text, expected):
    assert size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "mb", "1 parsec", "-1", "0.1b", False])
def test_wrong_sizes_say_so(text):
    with pytest.raises(ConfigurationError):
        size_bytes(text)


@given(st.integers(0, 10**7), st.sampled_from(["ms", "s", "min", "h"]))
def test_spaces_do_not_matter(number, unit):
    assert duration_ms(f"{number}{unit}") == duration_ms(f" {number}  {unit.upper()} ")


def test_nested_and_dotted_keys_are_the_same():
    nested = Configuration.from_mapping({"heartbeat": {"interval": "2s", "timeout": "20s"}})
    dotted = Configuration.from_mapping({"heartbeat.interval": 2000, "heartbeat.timeout": "20 s"})
    assert nested == dotted


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigurationError, match=r"did you mean heartbeat\.interval"):
        Configuration.from_mapping({"heartbeat.intervall": "1s"})
    with pytest.raises(
        ConfigurationError, match=r"did you mean execution\.checkpointing\.interval"
    ):
        parse_override("execution.checkpoint.interval=1s")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("heartbeat.timeout", "soon"),
        ("heartbeat.timeout", "500 ms"),  # not longer than the interval
        ("heartbeat.timeout", "3661 d"),  # gRPC takes deadlines only so far ahead
        ("rpc.timeout", "3661 d"),
        ("state.backend.type", "postgres"),
        ("jobmanager.rpc.port", "70000"),
        ("parallelism.default", "0"),
        ("restart-strategy.type", "sometimes"),
        ("execution.checkpointing.mode", "mostly-once"),
        ("jobmanager.exception-history-size", 2**70),  # protobuf has no such number
    ],
)
def test_a_wrong_value_is_an_error(key, value):
    with pytest.raises(ConfigurationError):
        Configuration.from_mapping({key: value})


def test_wrong_values_name_their_key():
    with pytest.raises(ConfigurationError, match=r"state\.backend\.type = 'postgres'"):
        Configuration.from_mapping({"state.backend.type": "postgres"})


def test_a_file_and_what_overrides_it(tmp_path):
    path = tmp_path / "penstock.yaml"
    path.write_text("parallelism.default: 3\nrestart-strategy:\n  type: off\n")
    config = Configuration.load(path, {"parallelism.default": "4"})
    assert config.parallelism_default == 4
    assert config.restart_strategy_type == "off"
    assert Configuration.load(tmp_path / "none.yaml") == Configuration()


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "unknown.key: 1\n"])
def test_a_wrong_file_is_an_error(tmp_path, content):
    path = tmp_path / "penstock.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError):
        Configuration.load(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("rpc.timeout: 1s\nrpc.timeout: 2s\n", "'rpc.timeout' is there twice, in lines 1 and 2"),
        ("heartbeat:\n  interval: 1s\nheartbeat:\n  timeout: 9s\n", "in lines 1 and 3"),
        ("heartbeat: {interval: 1s, interval: 1s}\n", "'interval' is there twice"),
        ("heartbeat.interval: 1s\nheartbeat:\n  interval: 2s\n", "'heartbeat.interval' is"),
        ("heartbeat: &a {interval: *a}\n", "an alias stands for what it lies in"),
    ],
)
def test_a_key_is_in_a_file_once(tmp_path: pathlib.Path, content: str, told: str) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=rf"^{path}: .*{told}"):
        Configuration.load(path)


def test_the_mapping_round_trips_and_holds_only_differences():
    assert Configuration().to_mapping() == {}
    config = Configuration.from_mapping(
        {
            "execution.buffer-timeout.interval": "5ms",
            "pipeline.auto-generate-uids": "false",
            "execution.checkpointing.interval": "1s",
            "restart-strategy.fixed-delay.attempts": 7,
        }
    )
    assert Configuration.from_mapping(config.to_mapping()) == config
    assert len(config.to_mapping()) == 4


def test_merging_keeps_the_rest():
    config = Configuration.from_mapping({"parallelism.default": 2}).merged({"log.level": "debug"})
    assert (config.parallelism_default, config.log_level) == (2, "debug")


def test_overrides_need_an_equals_sign():
    assert parse_override("parallelism.default = 2") == ("parallelism.default", "2")
    with pytest.raises(ConfigurationError, match="key=value"):
        parse_override("parallelism.default")


def test_every_key_is_described():
    for field in Configuration.model_fields.values():
        assert field.description
        assert field.description.endswith(".")
    assert len(set(known_keys())) == len(Configuration.model_fields)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("auto", "auto"),
        ("always", "always"),
        ("never", "never"),
        (True, "always"),
        ("true", "always"),
        (False, "never"),
        ("false", "never"),
    ],
)
def test_pre_aggregation_is_a_choice_of_three_or_a_switch(value, meant):
    config = Configuration.from_mapping({"execution.pre-aggregation": value})
    assert config.pre_aggregation == meant
    assert Configuration.from_mapping(config.to_mapping()) == config


def test_exchanges_and_failover_strategies_are_named_as_elsewhere():
    config = Configuration.from_mapping({})
    assert (config.default_exchange, config.failover_strategy) == ("pipelined", "region")
    for name in EXCHANGES:
        found = Configuration.from_mapping({"execution.exchange.default": name})
        assert found.default_exchange == name
    for name in ("full", "region", "individual"):
        key = "jobmanager.execution.failover-strategy"
        assert Configuration.from_mapping({key: name}).failover_strategy == name
    with pytest.raises(ConfigurationError, match=r"execution\.exchange\.default = 'cached'"):
        Configuration.from_mapping({"execution.exchange.default": "cached"})


@pytest.mark.parametrize("content", [b"s3.secret-key: 'very-secret\n: [", b"a: very-secret\n\xff"])
def test_what_is_in_a_file_that_is_no_yaml_is_not_told(
    tmp_path: pathlib.Path, content: bytes
) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="it is no YAML") as caught:
        Configuration.load(path)
    assert "very-secret" not in "".join(traceback.format_exception(caught.value))
    assert str(path) in str(caught.value)
    path.write_text("a: 1\nb: [\n")
    with pytest.raises(ConfigurationError, match=r"it is no YAML \(line 3, column 1\)"):
        Configuration.load(path)


@pytest.mark.parametrize(
    ("of_job", "said", "without_effect"),
    [
        (False, {"high-availability.storageDir": "/x"}, "high-availability.storageDir: without effect, since high-availability.type is none"),
        (False, {"high-availability.storageDir": "/x", "high-availability.type": "zookeeper"}, ""),
        (False, {"high-availability.type": "none"}, ""),
        (False, {"security.ssl.internal.ca": "x"}, "security.ssl.internal.enabled is false and security.ssl.client.enabled is false"),
        (False, {"security.ssl.internal.ca": "x", "security.ssl.client.enabled": True}, ""),
        (False, {"security.ssl.client.ca": "x"}, "security.ssl.client.enabled is false"),
        (True, {"security.ssl.client.ca": "x"}, "security.ssl.client.enabled is false"),
        (True, {"high-availability.storageDir": "/x"}, ""),
        (False, {"traces.reporter.otel.exporter.timeout": "1s"}, "traces.reporter.type is none"),
        (True, {"restart-strategy.failure-rate.delay": "2s"}, ""),  # the cluster may say so
        (True, {"restart-strategy.failure-rate.delay": "2s", "restart-strategy.type": "fallback"}, ""),
        (True, {"restart-strategy.failure-rate.delay": "2s", "restart-strategy.type": "failurerate"}, ""),
        (True, {"restart-strategy.failure-rate.delay": "2s", "restart-strategy.type": "none"}, "restart-strategy.type is none"),
        (False, {"restart-strategy.failure-rate.delay": "2s", "restart-strategy.type": "none"}, ""),  # jobs may have another
        (True, {"execution.checkpointing.interval": "none", "execution.checkpointing.min-pause": "1s"}, "execution.checkpointing.interval is 0"),
        (True, {"execution.runtime-mode": "batch", "execution.exchange.default": "caching"}, "execution.runtime-mode is batch"),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_told(of_job, said, without_effect):
    told = Configuration.from_mapping(said).without_effect(of_job=of_job)
    assert len(told) == bool(without_effect)
    assert without_effect in "".join(told)


def test_a_file_with_every_default_says_nothing_in_vain():
    every = Configuration().model_dump(by_alias=True, exclude_none=True)
    assert len(every) > 100
    for more in ({}, {"high-availability.type": "zookeeper"}, {"execution.runtime-mode": "batch"}):
        config = Configuration.from_mapping({**every, **more})
        assert config.without_effect() == config.without_effect(of_job=True) == []
