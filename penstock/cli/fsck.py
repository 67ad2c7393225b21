"""``penstock fsck``: checks a checkpoint store, without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.context import (
    EXIT_FAILED,
    echo,
    patiently,
    print_json,
    print_table,
    reports_errors,
)
from penstock.errors import ConfigurationError
from penstock.storage.store_names import has_scheme, whole_name, without_slash
from penstock.units import duration_ms

if TYPE_CHECKING:
    from penstock.storage.fsck_report import FsckReport, JobReport, Orphan

    Deleted = dict[str, tuple[Orphan, ...]]


def _store_name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """A path that is there, or the name of another store as it is."""
    try:
        name = whole_name(value)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from error
    if has_scheme(name):
        return without_slash(name)
    found = patiently(value, lambda: str(Path(name).resolve()) if Path(name).is_dir() else None)
    if found is None:
        raise click.BadParameter(f"Directory {value!r} does not exist.")
    return found


@click.command()
@click.argument("directory", metavar="STORAGE_DIR", callback=_store_name)
@click.option("--orphans", is_flag=True, help="List the objects that nothing refers to.")
@click.option("--delete", is_flag=True, help="With --orphans: delete them when they are listed.")
@click.option(
    "--force",
    is_flag=True,
    help="With --delete: no JobManager runs these jobs, so delete also what could be a running one's.",
)
@click.option(
    "--grace",
    default="1h",
    show_default=True,
    help="A job may be running while something was written to its directory within this time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with stable fields.")
@reports_errors
def fsck(
    directory: str, orphans: bool, delete: bool, force: bool, grace: str, as_json: bool
) -> None:
    """Check the checkpoints and savepoints in STORAGE_DIR.

    STORAGE_DIR is the directory of execution.checkpointing.dir, or that of one job in it, or one with
    savepoints, or a savepoint; also as s3://bucket/prefix. All that savepoints and retained checkpoints
    refer to is read. The exit status is 0 where all is well, 1 where something is
    damaged; orphans are no damage.

    With --orphans --delete, orphans are listed and then deleted, but not those of a job that may be
    running, nor uploads for a checkpoint newer than the newest completed one; --force deletes these
    too. While HEAD or a retained manifest of a job cannot be read, nothing of that job is deleted.
    """
    from penstock.storage.fsck import check_store, delete_orphans

    if delete and not orphans:
        raise click.UsageError("--delete deletes what --orphans lists: give both")
    if force and not delete:
        raise click.UsageError("--force says what --delete may delete: give both")
    root = directory
    grace_ms = duration_ms(grace)
    report = patiently(root, lambda: check_store(root, grace_ms=grace_ms))
    if not as_json:
        _print_report(report, orphans)
    deleted = patiently(root, lambda: delete_orphans(root, report, force=force)) if delete else {}
    if as_json:
        print_json(_report_fields(report, deleted))
    elif delete:
        _print_deleted(report, deleted)
    if not report.is_healthy:
        sys.exit(EXIT_FAILED)


def _print_report(report: FsckReport, orphans: bool) -> None:
    print_table(
        ["JOB", "CHECKPOINTS", "FILES", "REFERENCES", "BYTES", "ORPHANS", "RESULT"],
        [
            [
                job.directory,
                ", ".join(map(str, job.retained)) or "none",
                len(job.files),
                sum(file.reference_count for file in job.files),
                f"{sum(file.size_bytes for file in job.files):,}",
                len(job.orphans),
                "ok" if job.is_healthy else f"{len(job.problems)} damaged",
            ]
            for job in report.jobs
        ],
    )
    for job in report.jobs:
        for problem in job.problems:
            whose = ", ".join(str(id) for id in problem.checkpoints if id)
            suffix = f" (checkpoint {whose})" if whose else ""
            echo(f"{job.directory}/{problem.path}: {problem.message}{suffix}", err=True)
    listed = [(job, orphan) for job in report.jobs for orphan in job.orphans]
    if orphans and listed:
        echo()
        print_table(
            ["ORPHAN", "BYTES", "CHECKPOINT", "KEPT BECAUSE"],
            [
                [
                    f"{job.directory}/{orphan.path}",
                    f"{orphan.size_bytes:,}",
                    "" if orphan.checkpoint_id is None else orphan.checkpoint_id,
                    job.untouchable_because or orphan.kept_because,
                ]
                for job, orphan in listed
            ],
        )


def _print_deleted(report: FsckReport, deleted: Deleted) -> None:
    gone = [orphan for orphans in deleted.values() for orphan in orphans]
    left = sum(len(job.orphans) for job in report.jobs) - len(gone)
    echo(
        f"\ndeleted {len(gone)} orphans with {sum(orphan.size_bytes for orphan in gone):,} bytes, "
        f"kept {left}"
    )


def _report_fields(report: FsckReport, deleted: Deleted) -> dict[str, Any]:
    """``penstock fsck --json``."""
    return {
        "healthy": report.is_healthy,
        "jobs": [_job_fields(job, deleted.get(job.directory, ())) for job in report.jobs],
    }


def _job_fields(job: JobReport, deleted: tuple[Orphan, ...]) -> dict[str, Any]:
    gone = {orphan.path for orphan in deleted}
    return {
        "job_id": job.directory,
        "healthy": job.is_healthy,
        "checkpoints": list(job.retained),
        "problems": [
            {
                "kind": problem.damage.value,
                "path": problem.path,
                "message": problem.message,
                "checkpoints": list(problem.checkpoints),
            }
            for problem in job.problems
        ],
        "files": [
            {
                "path": file.path,
                "size_bytes": file.size_bytes,
                "referenced_bytes": file.referenced_bytes,
                "references": file.reference_count,
                "checkpoints": list(file.checkpoints),
            }
            for file in job.files
        ],
        "orphans": [
            {
                "path": orphan.path,
                "size_bytes": orphan.size_bytes,
                "modified_at_ms": orphan.modified_at_ms,
                "checkpoint_id": orphan.checkpoint_id,
                "young": orphan.is_young,
                "kept_because": job.untouchable_because or orphan.kept_because,
                "deleted": orphan.path in gone,
            }
            for orphan in job.orphans
        ],
    }
