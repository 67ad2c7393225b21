"""``penstock run`` and ``plan``: execute the user's script, and submit what it builds."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from penstock.cli.context import (
    EXIT_FAILED,
    EXIT_USAGE,
    client_security,
    common_options,
    echo,
    exit_status,
    jobmanager_addresses,
    print_json,
    reports_errors,
)
from penstock.client.code_shipping import import_paths
from penstock.client.job_result import job_result
from penstock.client.own_modules import set_apart
from penstock.client.progress import ProgressDisplay
from penstock.client.start_configuration import start_configuration
from penstock.client.submission import PlanCollected, SubmissionOverride, submission_override
from penstock.config import parse_override
from penstock.errors import ConfigurationError, JobRejected, StreamError
from penstock.printable import in_one_line

_script_argument = click.argument(
    "script", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
_rest_argument = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
_config_option = click.option(
    "-D", "overrides", multiple=True, metavar="KEY=VALUE", help="Wins over the script's own value."
)
_in_doubt_option = click.option(
    "--in-doubt",
    type=click.Choice(["commit", "leave"]),
    help="Output that a savepoint covers and that nobody may have committed.",
)
_ignore_option = click.option(
    "--allow-non-restored-state",
    is_flag=True,
    help="Leave out state of operators that are gone, and timers that nobody answers.",
)
_start_options = (
    click.option(
        "--from-savepoint",
        metavar="PATH",
        help="Start from a savepoint, a job's checkpoints, or one chk-<n> of them.",
    ),
    click.option("--claim", is_flag=True, help="What is started from belongs to the job."),
    _in_doubt_option,
    _ignore_option,
)


def _starts(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that say what a job starts from."""
    for option in reversed(_start_options):
        command = option(command)
    return command


_py_files_option = click.option(
    "--py-files",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="More code to ship: a file, a directory or a zip; may be repeated.",
)


@click.command()
@_script_argument
@_config_option
@_py_files_option
@click.option(
    "--requirements",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Checked against what the TaskManagers have, before anything starts.",
)
@click.option("--detach", is_flag=True, help="Return when the job is submitted.")
@_starts
@common_options
@_rest_argument
@reports_errors
def run(
    script: Path,
    overrides: tuple[str, ...],
    py_files: tuple[Path, ...],
    requirements: Path | None,
    detach: bool,
    from_savepoint: str | None,
    claim: bool,
    in_doubt: str | None,
    allow_non_restored_state: bool,
    jobmanager: str | None,
    as_json: bool,
    arguments: tuple[str, ...],
) -> None:
    """Run a job script on a cluster. Arguments of the script follow after --."""
    override = SubmissionOverride(
        address=jobmanager_addresses(jobmanager),
        config=client_security()
        | _configuration(overrides)
        | start_configuration(
            from_savepoint,
            claim=claim,
            in_doubt=in_doubt,
            ignores_unclaimed=allow_non_restored_state,
        ),
        detach=detach,
        py_files=py_files,
        requirements=_requirements(requirements),
        run_options=_run_options(script, overrides, py_files, requirements, jobmanager),
        run_arguments=arguments,
    )
    with ProgressDisplay() as display, submission_override(override), _free_stdout(as_json):
        override.on_progress = display
        status = _run_script(script, arguments, py_files)
    if as_json:
        print_json({"jobs": _jobs(override)})
    elif status == 0:
        for job in _jobs(override):
            echo(f"{job['job_id']} {in_one_line(str(job['name']))} {job['status']}", err=True)
    if status == 0 and not override.handles:
        echo(f"penstock: {script} submitted no job: it must call execute or submit", err=True)
        status = EXIT_FAILED
    sys.exit(status)


@click.command()
@_script_argument
@_config_option
@_py_files_option
@click.option(
    "--from-savepoint",
    metavar="PATH",
    help="Say of each state there whether it maps, migrates, is dropped or is refused.",
)
@_in_doubt_option
@_ignore_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_rest_argument
@reports_errors
def plan(
    script: Path,
    overrides: tuple[str, ...],
    py_files: tuple[Path, ...],
    from_savepoint: str | None,
    in_doubt: str | None,
    allow_non_restored_state: bool,
    as_json: bool,
    arguments: tuple[str, ...],
) -> None:
    """Show what a job script would submit; nothing runs.

    With --from-savepoint the status is 1 where a run would be refused.
    """
    start = start_configuration(
        from_savepoint, in_doubt=in_doubt, ignores_unclaimed=allow_non_restored_state
    )
    override = SubmissionOverride(
        config=_configuration(overrides) | start, py_files=py_files, plan_only=True
    )
    try:
        with submission_override(override), _free_stdout(as_json):
            status = _run_script(script, arguments, py_files)
    except PlanCollected as collected:
        from penstock.cli.planned_restore import planned_restore
        from penstock.graph.job_graph import explain, plan_dict

        restored = planned_restore(collected.graph)
        if as_json:
            fields = plan_dict(collected.graph)
            print_json(fields if restored is None else {**fields, "restore": restored.fields()})
        else:
            echo(explain(collected.graph))
            if restored is not None:
                restored.show()
        if restored is not None and restored.check.refusals:
            sys.exit(EXIT_FAILED)
        return
    if status == 0:
        echo(f"penstock: {script} submitted no job: it must call execute or submit", err=True)
    sys.exit(status or EXIT_FAILED)


def _run_script(script: Path, arguments: Sequence[str], py_files: Sequence[Path]) -> int:
    """Runs the script as ``__main__``; returns the exit status it asks for."""
    with _script_arguments(script, arguments, py_files):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except StreamError as error:
            echo(f"penstock: {error}", err=True)
            return exit_status(error)
        except KeyboardInterrupt:
            return 130
        except SystemExit as error:
            return _status_of(error)
        except Exception:  # noqa: BLE001 - the script's own error: shown as Python would
            _print_script_error(script)
            return EXIT_FAILED
    return 0


def _status_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    echo(str(error.code), err=True)
    return EXIT_FAILED


def _print_script_error(script: Path) -> None:
    """The traceback from the script on, without the frames that ran it."""
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def _free_stdout(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """With ``--json`` what the script prints goes to stderr: stdout is for one JSON document."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


@contextlib.contextmanager
def _script_arguments(
    script: Path, arguments: Sequence[str], py_files: Sequence[Path]
) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(script.parent.absolute()), *map(str, import_paths(py_files))]
    set_apart()
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _configuration(overrides: Sequence[str]) -> dict[str, str]:
    try:
        return dict(parse_override(text) for text in overrides)
    except ConfigurationError as error:
        echo(f"penstock: {error}", err=True)
        sys.exit(EXIT_USAGE)


def _run_options(
    script: Path,
    overrides: Sequence[str],
    py_files: Sequence[Path],
    requirements: Path | None,
    jobmanager: str | None,
) -> list[str]:
    """What runs the script again in the same way."""
    options = [] if jobmanager is None else ["--jobmanager", jobmanager]
    for override in overrides:
        if not override.startswith("execution.state-recovery."):
            options += ["-D", override]
    for file in py_files:
        options += ["--py-files", str(file)]
    if requirements is not None:
        options += ["--requirements", str(requirements)]
    return [*options, str(script)]


def _requirements(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobRejected(f"--requirements: {path} cannot be read: {error}") from error
    lines = [line.split(" #")[0].strip() for line in text.splitlines()]
    options = [line for line in lines if line.startswith("-")]
    if options:
        raise JobRejected(f"{path}: {options[0]!r} is an option of pip; list requirements only")
    return [line for line in lines if line and not line.startswith("#")]


def _jobs(override: SubmissionOverride) -> list[dict[str, object]]:
    jobs: list[dict[str, object]] = []
    for handle in override.handles:
        details = handle.details()
        result = job_result(details)
        jobs.append(
            {
                "job_id": handle.job_id,
                "name": details.summary.name,
                "status": result.status,
                "duration_s": (
                    result.duration.total_seconds() if details.summary.ended_at_ms else None
                ),
                "metrics": result.metrics,
            }
        )
    return jobs
