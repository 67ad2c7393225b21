"""The files of ``deploy/`` and ``docker-compose.yml``, judged by the tools that will read them.

Aim: what is documented for operators works as it is. Method: each file goes through the tool that
reads it in the end (docker-compose, systemd, hadolint, promtool, the configuration model), and so does a broken
copy, to show that the check sees something. No container is started: ``deploy/test_composed_cluster.py`` starts the
same as plain processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.config import Configuration, known_keys
from penstock.errors import ConfigurationError
from tests.support.servers import require, run_tool

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
CONFIG_FILE = ROOT / "deploy" / "config" / "penstock.yaml"
COMPOSED_CONFIG = ROOT / "deploy" / "compose" / "penstock.yaml"
PROMETHEUS = ROOT / "deploy" / "prometheus"
STORAGE = "/var/lib/penstock-storage"
TOKEN = "a-secret-for-this-test"
pytestmark = pytest.mark.integration

# ---------------------------------------------------------------- files


def compose_problems(directory: Path) -> tuple[int, str]:
    token = directory / "penstock-token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    (directory / "deploy" / "docker" / "radosgw").mkdir(parents=True)
    compose = require("docker-compose")
    file = directory / "docker-compose.yml"
    return run_tool([compose, "-f", file, "--profile", "s3", "config", "-q"])


def test_compose_file_is_valid(tmp_path: Path) -> None:
    shutil.copy(COMPOSE, tmp_path)
    assert compose_problems(tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("good", "broken"),
    [("command:", "comand:"), ("services:", "service:"), ("    volumes:\n", "    volumes\n")],
)
def test_a_broken_compose_file_is_noticed(tmp_path: Path, good: str, broken: str) -> None:
    text = COMPOSE.read_text()
    assert good in text
    (tmp_path / "docker-compose.yml").write_text(text.replace(good, broken, 1))
    status, output = compose_problems(tmp_path)
    assert status != 0, output


def test_all_composed_daemons_see_the_same_storage() -> None:
    composed = yaml.safe_load(COMPOSE.read_text())
    config = Configuration.load(COMPOSED_CONFIG)
    kept = (
        config.high_availability_storage_dir,
        config.execution_checkpointing_dir,
        config.execution_checkpointing_savepoint_dir,
    )
    assert all(directory.startswith(f"{STORAGE}/") for directory in kept)
    assert "storage" in composed["volumes"]
    daemons = [one for name, one in composed["services"].items() if "manager-" in name]
    assert len(daemons) == 4
    for service in daemons:
        assert f"storage:{STORAGE}" in service["volumes"]
        assert (
            "./deploy/compose/penstock.yaml:/var/lib/penstock/penstock.yaml:ro"
            in service["volumes"]
        )
    # A volume that is mounted on nothing belongs to root, and the daemons are not root.
    made = re.search(
        r"install -d -o penstock -g penstock (.+)$", DOCKERFILE.read_text(), re.MULTILINE
    )
    assert made is not None
    assert STORAGE in made[1].split()


def test_composed_services_are_where_they_are_looked_for() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    quorum = Configuration.load(COMPOSED_CONFIG).high_availability_zookeeper_quorum
    zookeepers = [f"{name}:2181" for name in services if name.startswith("zookeeper-")]
    assert quorum.split(",") == zookeepers
    jobmanagers = [f"{name}:6123" for name in services if name.startswith("jobmanager-")]
    for name in ("taskmanager-1", "taskmanager-2"):
        assert ",".join(jobmanagers) in services[name]["command"]
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    targets = [
        target
        for part in scraped["scrape_configs"][0]["static_configs"]
        for target in part["targets"]
    ]
    assert targets == [f"{name}:9249" for name in services if "manager-" in name]


def test_images_are_pinned_by_version() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    images = [service["image"] for service in services.values()]
    images += re.findall(r"^FROM (\S+:\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert len(images) > len(services)
    assert [image for image in images if not re.search(r":[v\w-]*\d+\.\d+", image)] == []


def unit_problems(unit: Path, directory: Path, text: str | None = None) -> str:
    """What systemd says against a unit; its interpreter is replaced by one that is installed."""
    analyze = require("systemd-analyze")
    text = unit.read_text() if text is None else text
    assert "ExecStart=/opt/penstock/bin/python " in text
    copy = directory / unit.name
    copy.write_text(text.replace("/opt/penstock/bin/python", sys.executable))
    status, output = run_tool([analyze, "verify", "--man=no", copy])
    problems = [line for line in output.splitlines() if unit.name in line]
    return "\n".join(problems) if status == 0 else output


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_units_are_valid(unit: Path, tmp_path: Path) -> None:
    assert unit_problems(unit, tmp_path) == ""


@pytest.mark.parametrize(
    ("good", "broken"),
    [
        (
            "ExecStart=/opt/penstock/bin/python",
            "ExecStart=/opt/penstock/bin/python --none\nExecSart=",
        ),
        ("Restart=always", "Restart=sometimes"),
        ("KillMode=", "KilMode="),
    ],
)
def test_a_broken_unit_is_noticed(tmp_path: Path, good: str, broken: str) -> None:
    text = UNITS[0].read_text()
    assert good in text
    assert unit_problems(UNITS[0], tmp_path, text.replace(good, broken, 1))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_start_the_daemon_they_are_named_after(unit: Path) -> None:
    role = unit.stem.removeprefix("penstock-")
    state = re.search(r"^StateDirectory=(.+)$", unit.read_text(), re.MULTILINE)
    assert state is not None
    command = f"ExecStart=/opt/penstock/bin/python -P -m {role} --dir /var/lib/{state[1]}\n"
    assert command in unit.read_text()
    # For ever: five starts within ten seconds are systemd's limit otherwise.
    assert "\nRestart=always\n" in unit.read_text()
    assert "\nStartLimitIntervalSec=0\n" in unit.read_text()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_may_write_the_documented_directory_of_checkpoints(unit: Path) -> None:
    documented = re.search(
        r"^execution\.checkpointing\.dir: (/\S+)$",
        (ROOT / "docs" / "operations.md").read_text(),
        re.MULTILINE,
    )
    assert documented is not None
    # The minus: a unit starts where nobody has made it.
    assert f"\nReadWritePaths=-{documented[1]}\n" in unit.read_text()


def installed_below(root: Path, *roles: str, version: str = "") -> tuple[int, str]:
    """Status of the script that installs, and what it says against it."""
    done = subprocess.run(
        ["bash", ROOT / "deploy" / "systemd" / "install.sh", *roles],
        env={**os.environ, "DESTDIR": str(root), "VERSION": version},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def test_the_units_are_installed_and_nothing_of_before_is_lost(tmp_path: Path) -> None:
    def install(*roles: str) -> tuple[int, str]:
        return installed_below(tmp_path, *roles)

    assert install("jobmanager", "taskmanager") == (0, "")
    for unit in UNITS:
        assert (tmp_path / "etc/systemd/system" / unit.name).read_text() == unit.read_text()
        state = tmp_path / "var/lib" / unit.stem
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert (state / "penstock.yaml").read_text() == CONFIG_FILE.read_text()
        assert "\nEnvironmentFile=-/etc/penstock/penstock.env\n" in unit.read_text()
    environment = tmp_path / "etc/penstock/penstock.env"
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    kept = {environment: "PENSTOCK_TOKEN=x\n", state / "penstock.yaml": "parallelism.default: 2\n"}
    for file, text in kept.items():
        file.write_text(text)
    assert install("jobmanager", "taskmanager") == (0, "")
    assert {file: file.read_text() for file in kept} == kept
    assert install("jobmaster") == (
        2,
        "install.sh: jobmaster is neither jobmanager nor taskmanager\n",
    )
    assert install()[0] == 2


def test_versions_lie_side_by_side_and_one_is_switched_to(tmp_path: Path) -> None:
    link, versions = tmp_path / "opt/penstock", tmp_path / "opt/penstock-versions"
    for version in ("0.1.0-a", "0.2.0-b", "half-made"):
        (versions / version).mkdir(parents=True)
        for unit in UNITS if version != "half-made" else ():
            (versions / version / "units").mkdir(exist_ok=True)
            (versions / version / "units" / unit.name).write_text(f"# of {version}")
    link.mkdir()  # by an earlier script
    (link / "program").touch()
    for version in ("0.1.0-a", "0.2.0-b", "0.1.0-a"):
        assert installed_below(tmp_path, "jobmanager", version=version) == (0, "")
        assert link.resolve() == versions / version
        unit = tmp_path / "etc/systemd/system/penstock-jobmanager.service"
        assert unit.read_text() == f"# of {version}"
    assert (versions / "before" / "program").exists()
    for version in ("0.3.0-c", "half-made", "../penstock-versions/0.2.0-b"):
        status, said = installed_below(tmp_path, "jobmanager", version=version)
        assert (status, f"there is no version {version} in" in said) == (2, True)
    assert link.resolve() == versions / "0.1.0-a"


def test_dockerfiles_are_valid(tmp_path: Path) -> None:
    hadolint = require("hadolint")
    for dockerfile in (DOCKERFILE, ROOT / "deploy" / "docker" / "radosgw" / "Dockerfile"):
        assert run_tool([hadolint, "--no-color", dockerfile]) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text(DOCKERFILE.read_text().replace("WORKDIR /src", "RUN cd src"))
    status, output = run_tool([hadolint, "--no-color", broken])
    assert status != 0
    assert "DL3003" in output


def test_dockerfile_copies_what_is_there() -> None:
    copied = re.findall(
        r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE
    )
    sources = [name for names in copied for name in names.split()]
    assert {"penstock", "common", "jobmanager", "taskmanager", "pyproject.toml"} <= set(sources)
    assert [name for name in sources if not (ROOT / name).exists()] == []


# ---------------------------------------------------------------- the configuration file

WITHOUT_DEFAULT = {
    "execution.checkpointing.interval": "10s",
    "execution.checkpointing.dir": "/var/lib/penstock/checkpoints",
    "execution.checkpointing.savepoint-dir": "/var/lib/penstock/savepoints",
    "execution.checkpointing.local-backup.dirs": "/var/lib/penstock/copies",
    "execution.checkpointing.local-backup.enabled": True,
    "execution.state-recovery.path": "/var/lib/penstock/savepoints/savepoint-1",
    "execution.state-recovery.in-doubt": "leave",
    "execution.spark.directory": "/mnt/shared/spark",
    "spark.*": None,
    "s3.endpoint": "http://127.0.0.1:9000",
    "s3.region": "eu-central-1",
    "s3.access-key": "key",
    "s3.secret-key": "secret",
    "restart-strategy.type": "fixed-delay",
    "taskmanager.spill.dir": "/var/lib/penstock/spill",
    "taskmanager.spill.shared-dir": "s3://bucket/spill",
    "taskmanager.spill.blocking-format": "parquet",
    "taskmanager.spill.caching-format": "arrow",
    "high-availability.storageDir": "/var/lib/penstock/shared",
    "high-availability.zookeeper.quorum": "zookeeper-1:2181,zookeeper-2:2181",
    "high-availability.zookeeper.client.credentials-file": "/run/secrets/zookeeper",
    "jobmanager.failure-enrichers": "team",
    "taskmanager.jobmanager-grace": "1min",
    "jobmanager.storage.dir": "/var/lib/penstock",
    "taskmanager.id": "tm-1",
    "security.ssl.client.ca": "/run/secrets/clients-ca.pem",
    "security.ssl.internal.ca": "/run/secrets/ca.pem",
    "security.ssl.internal.cert": "/run/secrets/cert.pem",
    "security.ssl.internal.key": "/run/secrets/key.pem",
    "security.token-file": "/run/secrets/penstock-token",
}


def uncommented() -> str:
    return re.sub(r"^#(?=[a-z])", "", CONFIG_FILE.read_text(), flags=re.MULTILINE)


def test_every_key_of_the_configuration_file_is_known_and_shows_its_default(tmp_path: Path) -> None:
    assert Configuration.load(CONFIG_FILE) == Configuration()
    values = yaml.safe_load(uncommented())
    assert sorted(values) == sorted(known_keys())
    assert sorted(key for key, value in values.items() if value is None) == sorted(WITHOUT_DEFAULT)
    defaults = {key: value for key, value in values.items() if value is not None}
    assert Configuration.from_mapping(defaults) == Configuration()

    filled = tmp_path / "penstock.yaml"
    filled.write_text(yaml.safe_dump({**values, **WITHOUT_DEFAULT}))
    loaded = Configuration.load(filled)
    assert loaded.security_token_file == "/run/secrets/penstock-token"
    assert loaded.taskmanager_id == "tm-1"

    filled.write_text(uncommented().replace("heartbeat.interval", "heartbeat.intervall"))
    with pytest.raises(ConfigurationError, match=r"did you mean heartbeat\.interval"):
        Configuration.load(filled)


# ---------------------------------------------------------------- Prometheus and Grafana


def alert_problems(directory: Path, text: str) -> tuple[int, str]:
    rules, tests = (directory / name for name in ("deploy/prometheus", "tests/integration/deploy"))
    for made in (rules, tests):
        made.mkdir(parents=True, exist_ok=True)
    (rules / "alerts.yml").write_text(text)
    shutil.copy(ROOT / "tests/integration/deploy/alerts_test.yml", tests)
    return run_tool([require("promtool"), "test", "rules", tests / "alerts_test.yml"])


def test_alerts_fire_on_what_they_are_for(tmp_path: Path) -> None:
    text = (PROMETHEUS / "alerts.yml").read_text()
    status, output = alert_problems(tmp_path, text)
    assert status == 0, output
    status, output = alert_problems(tmp_path, text.replace("_seconds > 600", "_seconds > 900"))
    assert status != 0, "a broken rule is noticed"
    tested = yaml.safe_load((ROOT / "tests/integration/deploy/alerts_test.yml").read_text())
    names = {one["alertname"] for test in tested["tests"] for one in test["alert_rule_test"]}
    rules = yaml.safe_load(text)["groups"][0]["rules"]
    assert names == {rule["alert"] for rule in rules}
    documented = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in documented] == []


def test_the_configuration_of_prometheus_is_valid(tmp_path: Path) -> None:
    promtool = require("promtool")
    status, output = run_tool([promtool, "check", "config", PROMETHEUS / "prometheus.yml"])
    assert status == 0, output
    shutil.copytree(PROMETHEUS, tmp_path / "broken")
    with (tmp_path / "broken" / "prometheus.yml").open("a") as file:
        file.write("scrap_configs: []\n")
    assert run_tool([promtool, "check", "config", tmp_path / "broken" / "prometheus.yml"])[0] != 0


def test_no_panel_of_the_dashboard_lies_upon_another() -> None:
    board = json.loads((ROOT / "deploy/grafana/dashboards/penstock.json").read_text())
    places = [panel["gridPos"] for panel in board["panels"]]
    corners = [(place["x"], place["y"]) for place in places]
    assert len(set(corners)) == len(corners) > 5
