"""Aim: Spark is given the files of a partition where it reads them, and they are still what was written.

Method: real files in the layout of a spill directory; what befalls them is done to them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.errors import PartitionUnavailable
from penstock.partition_id import PartitionId
from penstock.pb import graph_pb2
from taskmanager.partitions.in_place import PartitionInPlace, check_files, in_place
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.partitions.sealed_store import SealedStore, write_index
from taskmanager.partitions.spill_files import write_spill_files
from taskmanager.partitions.spill_format import FormatChoice, SpillFormat
from taskmanager.partitions.spill_layout import (
    PartitionIndex,
    SubpartitionIndex,
    partition_directory,
    subpartition_directory,
)
from taskmanager.task.exchange import DataExchange
from taskmanager.task.inputs_in_place import InputsInPlace
from tests.support.exchange_slots import numbers

ID = PartitionId("e0", "v0", 2, 7)


def sealed(root: Path, spill_format: SpillFormat = SpillFormat.PARQUET) -> SealedPartition:
    """A complete partition of one subpartition: 20 rows in two files."""
    directory = subpartition_directory(partition_directory(root, "job", ID), 0)
    files = [
        file
        for number in range(2)
        for file, _ in write_spill_files(
            directory, number, 10 * number, [numbers(10 * number, 10)], FormatChoice(spill_format)
        )
    ]
    write_index(root, PartitionIndex("job", ID, (SubpartitionIndex(0, tuple(files), ()),)))
    found = SealedStore(root).find("job", ID)
    assert found is not None
    return found


def placed(partition: SealedPartition, **config: str) -> PartitionInPlace | None:
    return in_place(partition, 0, Configuration.from_mapping(config))


def test_files_are_given_where_spark_reads_them_and_sees_them(tmp_path: Path) -> None:
    partition = sealed(tmp_path / "spill")
    found = placed(partition)
    assert found is not None
    assert [file.path.name for file in found.files] == ["00000000.parquet", "00000001.parquet"]
    assert sum(file.rows for file in found.files) == 20
    check_files([found])
    elsewhere = {"spark.remote": "sc://host:15002", "execution.spark.directory": str(tmp_path)}
    assert placed(partition, **elsewhere) == found
    elsewhere["execution.spark.directory"] = str(tmp_path / "other")
    assert placed(partition, **elsewhere) is None
    assert placed(sealed(tmp_path / "arrow", SpillFormat.ARROW)) is None


@pytest.mark.parametrize(
    ("befalls", "told"),
    [
        (Path.unlink, "is gone"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, and had"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "has been altered"),
    ],
)
def test_what_is_not_as_it_was_is_a_partition_that_is_not_available(
    tmp_path: Path, befalls: Callable[[Path], object], told: str
) -> None:
    found = placed(sealed(tmp_path))
    assert found is not None
    befalls(found.files[1].path)
    with pytest.raises(PartitionUnavailable, match=told) as unavailable:
        check_files([found])
    assert unavailable.value.partition == ID
    assert str(found.files[1].path) in str(unavailable.value)


class CompletePartition:
    """An exchange all of whose partitions are the same one, on this machine."""

    def __init__(self, partition: SealedPartition) -> None:
        self.partition = partition

    def complete_here(self, channel: internal_pb2.InputChannel) -> SealedPartition | None:
        return self.partition


@pytest.mark.parametrize(
    ("spill_format", "given"),
    [("UNSPECIFIED", 0), ("ARROW", 0), ("PARQUET", 1), ("OF_SPARK", 1)],
)
def test_files_that_are_parquet_by_configuration_alone_are_not_given(
    tmp_path: Path, spill_format: str, given: int
) -> None:
    """Their columns may be of types that Spark does not read: nanoseconds."""
    deployment = internal_pb2.TaskDeployment()
    deployment.vertex.operators.add().spark.SetInParent()
    said = graph_pb2.SpillFormat.Value(f"SPILL_FORMAT_{spill_format}")
    edge = deployment.inputs.add(spill_format=said)
    edge.channels.add()
    exchange = cast("DataExchange", CompletePartition(sealed(tmp_path)))
    inputs = InputsInPlace(deployment, exchange, Configuration.from_mapping({}))
    inputs.find()
    assert sum(map(len, inputs.partitions.values())) == given
    assert len(inputs.edges) == 1 - given
