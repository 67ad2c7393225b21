"""Output of one job that may be there twice: in its record, before it is written again, and in its numbers and log."""

from __future__ import annotations

from collections import deque
from typing import Final

import structlog

from jobmanager.checkpoint.repeated_output import RepeatedOutput
from jobmanager.job.checkpoint_gauges import CheckpointGauges
from jobmanager.job.exception_views import decode_repeated, encode_repeated
from jobmanager.job.job_record_runner import JobRecordRunner

_REPEATED_MAX: Final = 16


class RepeatedOutputRunner:
    """Keeps the last ones.

    Attributes:
        repeated: the newest last.
    """

    def __init__(self, job_id: str, record: JobRecordRunner, gauges: CheckpointGauges) -> None:
        self._record = record
        self._gauges = gauges
        self.repeated: deque[RepeatedOutput] = deque(maxlen=_REPEATED_MAX)
        self._has_read = False
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    async def note(self, repeated: RepeatedOutput | None) -> None:
        """A start goes back behind output that was committed; None = it does not.

        Raises:
            StreamError: the record cannot be read or written now.
        """
        if not self._has_read:
            for each in decode_repeated(await self._record.repeated()):
                self.repeated.append(each)
                self._gauges.note_repeated()
            self._has_read = True
        newest = self.repeated[-1] if self.repeated else None
        if repeated is None or repeated == newest:
            return  # another restart before the next checkpoint: nothing more was committed
        await self._record.note_repeated(encode_repeated([*self.repeated, repeated]))
        self.repeated.append(repeated)
        self._gauges.note_repeated()
        self._log.error(
            "checkpoint.output_repeated",
            from_checkpoint_id=repeated.from_checkpoint_id,
            to_checkpoint_id=repeated.to_checkpoint_id,
            files=repeated.files,
            file_count=repeated.file_count,
            places=repeated.places,
            reason=str(repeated),
        )
