"""What the documentation lists is what there is: commands, their options and fields, dependencies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest

from penstock.cli.describe import details_fields
from penstock.cli.main import main
from penstock.client.job_metrics import job_metrics
from penstock.pb import client_pb2

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?<!import )(?<!=)\bpenstock ((?:cluster )?[a-z]+)([^`\n|#]*)")
OPTION = re.compile(r"(?<![\w-])(--[a-z-]+|-D)\b")


def leaves(group: click.Group, prefix: str = "") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found |= leaves(command, f"{name} ")
        else:
            found[prefix + name] = command
    return found


COMMANDS = leaves(main)


def options_of(command: click.Command) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def mentions(text: str) -> list[tuple[str, str]]:
    """Command and arguments, wherever they are written as code."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code = [block for language, block in blocks if not language]
    code += re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    return [match for piece in code for match in COMMAND.findall(piece)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_in_the_documentation_exist(page: Path) -> None:
    for name, rest in mentions(page.read_text()):
        if name == "cluster start|stop|status":
            continue
        assert name in COMMANDS or name in main.commands, f"penstock {name}"
        arguments = rest.partition(" -- ")[0]
        if name in COMMANDS:
            unknown = set(OPTION.findall(arguments)) - options_of(COMMANDS[name])
            assert not unknown, f"penstock {name}: {unknown}"


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    documented: dict[str, str] = {}
    for name, rest in mentions(text):
        documented[name] = documented.get(name, "") + rest
    assert set(COMMANDS) <= set(documented)
    everywhere = {"--json", "--jobmanager", "--jobmanagers", "--dir"}
    for name, command in COMMANDS.items():
        missing = options_of(command) - everywhere - set(OPTION.findall(documented[name]))
        missing = {option for option in missing if option.startswith("-")}
        assert not missing, f"penstock {name}: {missing}"


def test_fields_of_json_documents_are_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    words = set(re.findall(r"\w+", text))
    details = client_pb2.JobDetails(
        vertices=[client_pb2.VertexDetails(subtasks=[client_pb2.SubtaskDetails()])],
        failure=client_pb2.FailureCause(message="x"),
    )
    fields = details_fields(details)
    vertex, failure = fields["vertices"][0], fields["failure"]
    subtask = vertex["subtasks"][0]
    names = [*fields, *vertex, *failure, *subtask, *subtask["metrics"]]
    names += job_metrics(client_pb2.JobDetails())["totals"]
    assert sorted(set(names) - words) == []


def package(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]


def test_dependencies_are_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "dependencies.md").read_text()
    rows = re.findall(r"^\| ([a-z0-9, -]+) \|", text, re.MULTILINE)
    explained = {name for row in rows for name in row.split(", ")} - {"package", "---"}
    assert explained == {package(requirement) for requirement in project["dependencies"]}

    development = text[text.index("For development") :]
    for requirement in project["optional-dependencies"]["dev"]:
        name = package(requirement)
        is_stubs = name.startswith("types-")
        is_extra = name == project["name"]  # of its own, explained above
        assert is_stubs or is_extra or name.removesuffix("-bin") in development, name
