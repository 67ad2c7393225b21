"""Whether a job can be started from a savepoint or another job's checkpoint, and what becomes of each state.

State belongs to the uid of its operator, whatever vertex, chain or subtask it was in. The client that plans and
the JobManager that starts ask the same question here.

Source: Carbone et al., "State Management in Apache Flink", sections 3.1.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.graph.output_in_doubt import OutputDecision
from penstock.graph.rows_left_behind import exchange_problems, persisted_problems
from penstock.graph.state_meaning import (
    TIMERS,
    change_of_input,
    change_of_output,
    changed_aggregates,
    changed_built_in,
    changed_format,
    changed_meaning,
    unanswered_timers,
    untimely_timers,
)
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.codec import ENTRY_ARROW, Stamped, codec_of
from penstock.storage.codec_migration import (
    OTHER_NAME,
    MigrationRefusedError,
    field_changes,
    migration,
)
from penstock.storage.prepared_output import COMMITTABLES

OPERATOR_LIST = "operator list"
"""Kind of a declared state without a key."""
BUNDLE_LIST = "bundle"
"""What an aggregation in front of an exchange holds back."""
_OF_PRE_AGGREGATION = frozenset({BUNDLE_LIST, "gauge", "largest_time"})
_OF_COLLECT = frozenset({"collect"})
_KEY_SPACE = "key_space/"
"""Stands before the names of such states where a database keeps them."""
READ_BY_ALL = "hashmap"
"""Its format is that of canonical savepoints."""
_OF_KEYS = frozenset({"value", "list", "map"})
_UNDECLARED = "the function declares no such state any more"
_COMMITS = OutputDecision(commits=True)
_CODEC = b"codec"
_STATEFUL = frozenset(
    {"source", "process", "window_aggregate", "window_function", "running_aggregate", "join"}
)
_NAMED_MAX = 10


class Fate(Enum):
    """What becomes of a state."""

    MAPS = "maps"
    MIGRATES = "migrates"
    DROPPED = "dropped"
    REFUSED = "refused"
    NEW = "new"


@dataclass(frozen=True, slots=True)
class StateFate:
    """One state of one operator.

    Attributes:
        state: its name; "splits" of a source; "" = all that the operator has.
        reason: why it is so; "" where it maps as it is.
        is_uid_generated: the operator has its uid from its place in the graph: another graph may lose it.
    """

    uid: str
    operator: str
    state: str
    fate: Fate
    reason: str = ""
    is_uid_generated: bool = False


@dataclass(frozen=True, slots=True)
class RestoreCheck:
    """What was found.

    Attributes:
        fates: by operator, in the order of the stored graph.
        problems: why it cannot be started, beside states that are refused.
    """

    fates: tuple[StateFate, ...]
    problems: tuple[str, ...]

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why it cannot be started; none = it can. What holds for several states of an operator is said once."""
        states: dict[tuple[str, str, str], list[str]] = {}
        for fate in self.fates:
            if fate.fate is Fate.REFUSED:
                named = states.setdefault((fate.operator, fate.uid, fate.reason), [])
                named += [repr(fate.state)] if fate.state else []
        refused = (
            f"state {', '.join(named)} of operator {operator!r} (uid {uid!r}): {reason}"
            if named
            else f"operator {operator!r} (uid {uid!r}): {reason}"
            for (operator, uid, reason), named in states.items()
        )
        return (*self.problems, *refused)

    @property
    def dropped(self) -> tuple[StateFate, ...]:
        """What is left out."""
        return tuple(fate for fate in self.fates if fate.fate is Fate.DROPPED)

    @property
    def migrated(self) -> tuple[StateFate, ...]:
        """What goes on in another form."""
        return tuple(fate for fate in self.fates if fate.fate is Fate.MIGRATES)

    @property
    def changed(self) -> tuple[StateFate, ...]:
        """What goes on as it is, where its operator does something else with it, or beside it."""
        return tuple(fate for fate in self.fates if fate.fate is Fate.MAPS and fate.reason)

    def raise_refusal(self, job: str, path: str) -> None:
        """Says all that is refused.

        Raises:
            JobRejected: something is.
        """
        refusals = self.refusals
        if refusals:
            shown = "; ".join(refusals[:_NAMED_MAX])
            more = f"; and {len(refusals) - _NAMED_MAX} more" if len(refusals) > _NAMED_MAX else ""
            raise JobRejected(f"job {job!r} cannot be started from {path}: {shown}{more}")


def declared_fate(
    operator: graph_pb2.Operator, name: str, table: checkpoint_pb2.StateTable | None
) -> tuple[Fate, str]:
    """What becomes of the values of a state per key, by what the function declares now."""
    if table is None or table.kind not in _OF_KEYS or not operator.HasField("process"):
        return Fate.MAPS, ""
    declared = next((one for one in operator.process.states if one.name == name), None)
    if declared is None:
        return Fate.DROPPED, _UNDECLARED
    if declared.kind != table.kind:
        return (
            Fate.REFUSED,
            f"it was stored as a {table.kind}, and is declared as a {declared.kind}: {OTHER_NAME}",
        )
    schema = pa.ipc.read_schema(pa.py_buffer(table.schema))
    codecs = [(one.metadata or {}).get(_CODEC, b"").decode() for one in schema]
    return _fate_of_values(declared, codecs[-2], codecs[-1])


def listed_fate(
    operator: graph_pb2.Operator, name: str, codec: str, *, was_declared: bool = False
) -> tuple[Fate, str]:
    """What becomes of a state without a key, by what the function declares now.

    Args:
        codec: of what was stored; "" = nothing was.
        was_declared: by the function that has stored it; else it may be the operator's own.
    """
    declared = next(
        (one for one in operator.process.states if one.name == name and one.kind == OPERATOR_LIST),
        None,
    )
    if declared is None and was_declared:
        return Fate.DROPPED, _UNDECLARED
    if declared is None or not codec:
        return Fate.MAPS, ""
    key_codec, arrow, values = codec.partition(ENTRY_ARROW)
    if bool(arrow) != bool(declared.key_codec):
        return (
            Fate.REFUSED,
            f"it was stored as {codec}, and is declared as another kind of state: {OTHER_NAME}",
        )
    return _fate_of_values(declared, key_codec, values if arrow else codec)


def _fate_of_values(
    declared: graph_pb2.DeclaredState, key_codec: str, codec: str
) -> tuple[Fate, str]:
    if declared.key_codec and key_codec != declared.key_codec:
        return (
            Fate.REFUSED,
            f"its keys were stored as {key_codec}, and are {declared.key_codec} now: {OTHER_NAME}",
        )
    new = codec_of(declared.codec)
    if declared.type:
        new = codec_of(pa.ipc.read_schema(pa.py_buffer(declared.type)).field(0).type)
    if declared.ttl_ms:
        new = Stamped(new)
    if codec == new.name:
        return Fate.MAPS, ""
    old = codec_of(codec)
    try:
        migration(old, new)
    except MigrationRefusedError as error:
        return Fate.REFUSED, str(error)
    fields = field_changes(old, new)
    return Fate.MIGRATES, f"from {codec} to {new.name}{': ' if fields else ''}{fields}"


def check_restore(
    graph: graph_pb2.JobGraph,
    manifest: checkpoint_pb2.CheckpointManifest,
    *,
    ignores_unclaimed: bool,
    backend: str = "",
    output: OutputDecision = _COMMITS,
) -> RestoreCheck:
    """What becomes of each state.

    Args:
        graph: with the key-groups that ``adopt_key_groups`` gave it.
        ignores_unclaimed: state of operators that are gone, and timers that no function answers, are dropped.
        backend: that the job keeps its state in; "" = not looked at.
        output: what becomes of output that is prepared there.
    """
    operators = {one.uid: one for vertex in graph.vertices for one in vertex.operators}
    vertex_of = {one.uid: vertex for vertex in graph.vertices for one in vertex.operators}
    held = _held(manifest)
    done = {one.operator_uid for one in manifest.done_splits}
    fates: list[StateFate] = []
    for stored in (one for vertex in manifest.vertices for one in vertex.operators):
        snapshots = held.get(stored.uid, [])
        states = _states(stored, snapshots, has_done=stored.uid in done, has_output=output.commits)
        if not states:
            continue
        operator = operators.get(stored.uid)
        if operator is None:
            fates.append(_unclaimed(stored, states, ignores_unclaimed))
            continue
        refusal = (
            _key_group_problem(snapshots, vertex_of[stored.uid])
            or _backend_problem(snapshots, backend)
            or changed_meaning(stored.declared, operator)
            or _format_problem(stored, snapshots, operator)
        )
        if refusal:
            fates += [_fate(stored, state, Fate.REFUSED, refusal) for state in states]
        else:
            fates += _fates_of(stored, states, snapshots, operator, ignores_unclaimed)
    own = {uid: operator for uid, operator in operators.items() if not _is_partial(operator)}
    fates += _new(own, manifest)
    named = (
        replace(
            one, is_uid_generated=one.is_uid_generated and one.uid not in operators.keys() - own
        )
        for one in fates
    )
    problems = (*exchange_problems(manifest), *persisted_problems(operators, manifest))
    problems += (output.refusal,) if output.refusal else ()
    return RestoreCheck(tuple(named), problems)


def _fates_of(
    stored: checkpoint_pb2.OperatorFingerprint,
    states: Iterable[str],
    snapshots: Sequence[checkpoint_pb2.OperatorSnapshot],
    operator: graph_pb2.Operator,
    ignores_unclaimed: bool,
) -> Iterator[StateFate]:
    """What becomes of the states of an operator that goes on with them as a whole."""
    tables = {table.name: table for one in snapshots for table in one.keyed.tables}
    codecs = {one.name: one.codec for each in snapshots for one in each.lists if one.codec}
    for state in states:
        name = state.removeprefix(_KEY_SPACE)
        if state in codecs:
            was_declared = any(one.name == name for one in stored.declared.process.states)
            fate, reason = listed_fate(operator, name, codecs[state], was_declared=was_declared)
        else:
            fate, reason = declared_fate(operator, name, tables.get(state))
        changed = changed_aggregates(stored.declared, operator) if state in tables else ""
        if changed:
            fate, reason = Fate.MIGRATES, changed
        if refused := _changed_state(stored.declared, operator, name):
            fate, reason = Fate.REFUSED, refused
        elif told := (
            change_of_output(stored.declared, operator)
            or change_of_input(stored.declared, operator, is_open=_has_open_splits(snapshots))
        ):
            reason = told
        elif lost := unanswered_timers(stored.declared, operator, name):
            fate, reason = _lost(lost, ignores_unclaimed)
        yield _fate(stored, name, fate, reason)


def _changed_state(stored: graph_pb2.Operator, now: graph_pb2.Operator, name: str) -> str:
    return changed_built_in(stored, now, name) or untimely_timers(stored, now, name)


def _lost(reason: str, ignores_unclaimed: bool) -> tuple[Fate, str]:
    """What becomes of state that nothing of the job goes on with."""
    if ignores_unclaimed:
        return Fate.DROPPED, reason
    return Fate.REFUSED, f"{reason}: define it, or leave them out with --allow-non-restored-state"


def _new(
    operators: Mapping[str, graph_pb2.Operator], manifest: checkpoint_pb2.CheckpointManifest
) -> Iterator[StateFate]:
    """Operators that keep state, and have none there."""
    known = {one.uid for vertex in manifest.vertices for one in vertex.operators}
    for uid, operator in operators.items():
        if uid not in known and operator.WhichOneof("spec") in _STATEFUL:
            reason = "it begins without state"
            yield StateFate(uid, operator.name, "", Fate.NEW, reason, operator.uid_is_generated)


def _is_partial(operator: graph_pb2.Operator) -> bool:
    """Whether it is the planner's own, in front of an exchange: nobody can give it a uid, and it keeps next to nothing."""
    partial = graph_pb2.AGGREGATION_PHASE_PARTIAL
    return partial in (operator.window_aggregate.phase, operator.running_aggregate.phase)


def adopt_key_groups(
    graph: graph_pb2.JobGraph, manifest: checkpoint_pb2.CheckpointManifest
) -> None:
    """Takes over the number of key-groups that state was stored with, where the user has said none.

    Vertices between which rows stay where they lie keep the same number.
    """
    stored = {one.uid: vertex for vertex in manifest.vertices for one in vertex.operators}
    for group in _joined_by_forward(graph):
        known = {
            stored[one.uid].max_parallelism
            for vertex in group
            for one in vertex.operators
            if one.uid in stored
        }
        if len(known) == 1 and not any(vertex.max_parallelism_is_explicit for vertex in group):
            for vertex in group:
                vertex.max_parallelism = next(iter(known))


def _joined_by_forward(graph: graph_pb2.JobGraph) -> Iterable[list[graph_pb2.Vertex]]:
    group_of = {vertex.id: [vertex] for vertex in graph.vertices}
    for edge in graph.edges:
        source, target = group_of.get(edge.source_vertex), group_of.get(edge.target_vertex)
        is_forward = edge.partitioning == graph_pb2.PARTITIONING_FORWARD
        if is_forward and source is not None and target is not None and source is not target:
            source += target
            group_of.update((vertex.id, source) for vertex in target)
    return {id(group): group for group in group_of.values()}.values()


def _held(
    manifest: checkpoint_pb2.CheckpointManifest,
) -> Mapping[str, list[checkpoint_pb2.OperatorSnapshot]]:
    held: dict[str, list[checkpoint_pb2.OperatorSnapshot]] = {}
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            held.setdefault(operator.operator_uid, []).append(operator)
    return held


def _states(
    stored: checkpoint_pb2.OperatorFingerprint,
    snapshots: Iterable[checkpoint_pb2.OperatorSnapshot],
    *,
    has_done: bool,
    has_output: bool,
) -> list[str]:
    """Names of what would be lost with an operator."""
    tables: dict[str, None] = {}
    lists: dict[str, None] = {}
    splits = has_done
    for snapshot in snapshots:
        tables.update(dict.fromkeys(_held_tables(snapshot.keyed)))
        lists.update((one.name, None) for one in snapshot.lists if _has_items(one))
        splits = splits or bool(snapshot.splits)
    if stored.kind == "sink" and lists.keys() <= _OF_COLLECT:
        lists.clear()  # rows that the client of the other job has got
    if stored.kind == "sink" and not has_output:
        lists.pop(COMMITTABLES, None)
    if lists.keys() <= _OF_PRE_AGGREGATION and BUNDLE_LIST not in lists:
        lists.clear()
    return [*tables, *lists, *(["splits"] if splits else [])]


def _held_tables(keyed: checkpoint_pb2.KeyedStateSnapshot) -> Iterator[str]:
    """Names of its states; not of timers where it is known that there are none."""
    if not keyed.segments and not keyed.files:
        return
    held = {segment.table for segment in keyed.segments if not segment.is_empty}
    empty = {segment.table for segment in keyed.segments} - held
    for index, table in enumerate(keyed.tables):
        if index not in empty or table.name not in TIMERS:
            yield table.name


def _has_items(held: checkpoint_pb2.OperatorStateSnapshot) -> bool:
    if held.HasField("handle"):
        return True
    if held.name == BUNDLE_LIST:
        return any(held.items)
    return bool(held.items)


def _unclaimed(
    stored: checkpoint_pb2.OperatorFingerprint, states: Sequence[str], ignores_unclaimed: bool
) -> StateFate:
    names = ", ".join(state.removeprefix(_KEY_SPACE) for state in states)
    if ignores_unclaimed:
        return _fate(stored, "", Fate.DROPPED, f"the job has no such operator ({names})")
    if BUNDLE_LIST in states:
        return _fate(
            stored,
            "",
            Fate.REFUSED,
            "it holds rows that were aggregated in front of an exchange and had not left, and the job as it is planned "
            "now has no such phase: take a savepoint, which lets them go, and start from that; or keep the aggregates "
            "and execution.pre-aggregation as they were; or leave these rows out with --allow-non-restored-state",
        )
    generated = (
        "; the uid was made from its place in the graph, which has changed"
        * stored.uid_is_generated
    )
    return _fate(
        stored,
        "",
        Fate.REFUSED,
        f"it has state ({names}), and the job has no such operator{generated}: give the operator that goes on "
        f"with it .uid({stored.uid!r}), or leave it out with --allow-non-restored-state",
    )


def _fate(
    stored: checkpoint_pb2.OperatorFingerprint, state: str, fate: Fate, reason: str = ""
) -> StateFate:
    name = state.removeprefix(_KEY_SPACE)
    return StateFate(stored.uid, stored.name, name, fate, reason, stored.uid_is_generated)


def _key_group_problem(
    snapshots: Iterable[checkpoint_pb2.OperatorSnapshot], vertex: graph_pb2.Vertex
) -> str:
    for snapshot in snapshots:
        stored = snapshot.keyed.max_parallelism
        if snapshot.HasField("keyed") and stored != vertex.max_parallelism:
            return (
                f"it was stored with max-parallelism {stored}, and the job says {vertex.max_parallelism}: it "
                f"decides which key-group a key belongs to, so it cannot change; say {stored}, or nothing"
            )
        if snapshot.HasField("keyed") and vertex.parallelism > stored:
            return (
                f"it was stored with max-parallelism {stored}, and the job has parallelism "
                f"{vertex.parallelism}, which cannot be larger: set a parallelism of {stored} or less"
            )
    return ""


def _backend_problem(snapshots: Iterable[checkpoint_pb2.OperatorSnapshot], backend: str) -> str:
    for snapshot in snapshots:
        stored = snapshot.keyed.backend
        if backend and stored and stored not in (backend, READ_BY_ALL):
            return (
                f"it was stored by the backend {stored!r}, and the job keeps its state in {backend!r}: set "
                f"state.backend.type: {stored}, or take a canonical savepoint"
            )
    return ""


def _format_problem(
    stored: checkpoint_pb2.OperatorFingerprint,
    snapshots: Iterable[checkpoint_pb2.OperatorSnapshot],
    operator: graph_pb2.Operator,
) -> str:
    """Files that have been read in part, or are known and not read yet, are those of one format."""
    return changed_format(stored.declared, operator) if _has_open_splits(snapshots) else ""


def _has_open_splits(snapshots: Iterable[checkpoint_pb2.OperatorSnapshot]) -> bool:
    return any(not split.done for one in snapshots for split in one.splits)
