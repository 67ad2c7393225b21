"""From the columns of a file to the columns of a source's rows.

The declared schema says what the source promises; each file is checked against it when it is opened: a
missing column and a type that cannot be cast are errors, other columns are ignored. What can be cast is cast batch by
batch, by whoever takes the rows (``penstock.rows.conforming``). Columns that a ``key=value`` directory gives win over
the file's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.types as pt

from penstock.connectors.listing import partition_values
from penstock.connectors.messages import name_list, nearest_name
from penstock.connectors.text_options import DEFAULTS, TextOptions
from penstock.connectors.text_parsing import times_of_day
from penstock.errors import TaskFailure
from penstock.rows.casting import cast_kernel
from penstock.rows.conforming import is_castable


class ColumnPlan:
    """How the rows of one file get the source's columns.

    Attributes:
        output: schema of the source's rows.
        file_schema: the declared columns that are read from the file, in order of ``output``.
        declared_names: all columns that were declared of the file, in order.
        options: how its text is read.
    """

    def __init__(
        self,
        output: pa.Schema,
        path: str,
        base: str,
        *,
        declared: Sequence[str] = (),
        options: TextOptions = DEFAULTS,
    ) -> None:
        self.output = output
        self.options = options
        self.path = path
        texts = partition_values(base, path)
        self._constants = {
            field.name: self._constant(field, texts[field.name])
            for field in output
            if field.name in texts
        }
        self.file_schema = pa.schema([f for f in output if f.name not in self._constants])
        self.declared_names = [name for name in declared if name not in texts]

    def _constant(self, field: pa.Field, text: str | None) -> pa.Scalar:
        try:
            return _from_text(pa.chunked_array([pa.array([text], pa.string())]), field.type)[0]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise TaskFailure(
                f'{self.path}: the directory says {field.name}="{text}", which is not {field.type}; give a schema= that fits all directories'
            ) from error

    def check_present(self, file_schema: pa.Schema) -> None:
        """Refuses a file without a declared column, with several of its name, or with one of a type that cannot be cast.

        Raises:
            TaskFailure: names file, column and the nearest name.
        """
        self.check_names(file_schema.names)
        for field in self.file_schema:
            if file_schema.names.count(field.name) > 1:
                raise TaskFailure(
                    f'{self.path}: has several columns "{field.name}", and which one is meant cannot be told; '
                    "write the file with names that differ, or leave the column out of schema="
                )
            self._check_castable(field, file_schema.field(field.name).type)

    def check_names(self, names: Sequence[str], hint: str = "") -> None:
        """Refuses a file that has columns of these names only, where a declared one is missing.

        Args:
            hint: what may be the reason.

        Raises:
            TaskFailure: names file, column and the nearest name.
        """
        for name in self.file_schema.names:
            if name not in names and name not in self.options.optional:
                raise TaskFailure(
                    f'{self.path}: has no column "{name}"{nearest_name(name, names)}; its columns: '
                    f"{name_list(names)}; {hint or 'every file of a source must have all its columns'}"
                )

    def _check_castable(self, field: pa.Field, actual: pa.DataType) -> None:
        if not is_castable(actual, field.type):
            raise TaskFailure(
                f'{self.path}: column "{field.name}" is {actual}, the source declares {field.type}; '
                "give a schema= that fits all files"
            )

    def assemble(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the file, with at least the columns of ``file_schema``, with the columns of the source."""
        if batch.schema.equals(self.output):
            return batch
        arrays = [self._array(batch, field.name) for field in self.output]
        fields = [
            pa.field(field.name, array.type, field.nullable)
            for field, array in zip(self.output, arrays, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def _array(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        constant = self._constants.get(name)
        if constant is not None:
            return pa.repeat(constant, batch.num_rows)
        return batch.column(batch.schema.get_field_index(name))


def _from_text(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Values of which directories are called: as ``hive_partitions`` writes them, and as a cast reads them.

    Raises:
        pa.ArrowInvalid: a text is none of that type.
        pa.ArrowNotImplementedError: the type has no values that are text.
    """
    if pt.is_dictionary(kind):
        return _from_text(texts, kind.value_type).dictionary_encode().cast(kind)
    if pt.is_time(kind):
        return times_of_day(texts, kind)
    if pt.is_duration(kind):
        return cast_kernel(pa.string(), pa.int64(), safe=True)(texts).cast(kind)
    return cast_kernel(pa.string(), kind, safe=True)(texts)
