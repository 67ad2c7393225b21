"""Where a stream meets another one: connected for a function of both, or joined by key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import JobRejected
from penstock.graph.logical import NodeInput
from penstock.streams.job_builder import JobBuilder

if TYPE_CHECKING:
    from penstock.streams.connected_streams import ConnectedStreams
    from penstock.streams.stream import Schema, Stream
    from penstock.streams.windows import Duration, Window


class StreamPairs:
    """Calls of a stream that take a second one."""

    _builder: JobBuilder
    _source: NodeInput

    def connect(self, other: Stream) -> ConnectedStreams:
        """This stream and another one, for a function that takes the rows of both: in any order between them.

        Which row of which stream comes first is open, and may differ from run to run. Where the function
        looks rows of this stream up in the other one, which has an end, say
        ``stream.connect(other.broadcast(load_first=True))``: it then sees all rows of the other stream before
        it sees one of this; in batch mode that is so by default.

        Args:
            other: broadcast, or keyed where this stream is keyed, or neither.
        """
        from penstock.streams.connected_streams import ConnectedStreams

        return ConnectedStreams(self._builder, self._source, self._other("connect", other))

    def join(
        self,
        other: Stream,
        *,
        on: str | Sequence[str],
        within: tuple[Duration, Duration] | None = None,
        window: Window | None = None,
        how: str = "inner",
    ) -> Stream:
        """Joins the rows of this stream (left) and another one (right) that have equal keys.

        The output has the key columns, ``window_start`` and ``window_end`` of a window join, the left
        columns, the right columns; a right column whose name is taken gets the suffix ``_right``. As in
        SQL, a null key equals nothing. Its event time is the later one of both rows, or the last
        millisecond of the window. Late rows are dropped and counted.

        Args:
            on: the key columns, which have the same names on both sides.
            within: interval join: how much later (at least, at most) the right row may be than the left
                one, bounds included: ``("-5s", "5s")``.
            window: window join of the rows in the same ``ps.tumbling``, ``ps.sliding`` or ``ps.session``
                window; the sessions of a key are those of both streams together.
            how: of window joins: "inner", "left", "right" or "full"; columns of a missing row are null.
        """
        from penstock.streams.joins import add_join

        right = self._other("join", other)
        return add_join(self._builder, self._source, right, on, within, window, how)

    def spark(
        self,
        fn: Callable[..., Any],
        *streams: Stream,
        schema: Schema = None,
        timeout: Duration | None = None,
        cores: int | None = None,
    ) -> Stream:
        """Hands all rows to Spark at once, and goes on with what comes of them: for bounded streams, in batch mode or as the history of a stream.

        The output has no event time, and its rows come in no fixed order.

        Args:
            fn: ``fn(DataFrame, ...) -> DataFrame``; a DataFrame of this stream, and one for each of ``streams``.
                It runs in a process of its own beside the slot, which alone imports pyspark.
            streams: more inputs.
            schema: the columns of the DataFrame that ``fn`` returns, in any order there.
            timeout: how long it may take, the start of Spark not counted; None = as long as it likes.
            cores: of Spark in local mode; None = as many as the TaskManager has slots. The first stage of a
                job that starts a session decides for those that share it.
        """
        from penstock.streams.spark_stages import add_spark_stage

        inputs = (self._source, *(self._other("spark", other) for other in streams))
        return add_spark_stage(self._builder, inputs, fn, schema, timeout, cores)

    def _other(self, call: str, other: StreamPairs) -> NodeInput:
        if not isinstance(other, StreamPairs):
            raise JobRejected(f"{call}: {other!r} is no stream")
        if other._builder is not self._builder:
            raise JobRejected(f"{call}: the streams belong to different environments")
        return other._source
