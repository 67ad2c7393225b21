"""What is said beside the manifest of a savepoint of the output that it covers."""

from __future__ import annotations

from penstock.storage.object_store import ObjectStore
from penstock.storage.output_claim import OutputUse
from penstock.storage.prepared_output import claim_beside
from penstock.storage.savepoint import ABOUT_OUTPUT, COMMITTED_PATH


def marks_beside(store: ObjectStore) -> set[str]:
    """Of "committed", "taken-back" and "claimed" those that are said in its directory."""
    beside = store.sizes(ABOUT_OUTPUT)
    claim = claim_beside(store, beside)
    marks = {COMMITTED_PATH} & {*beside}
    if claim is not None:
        marks.add("taken-back" if claim.use is OutputUse.TAKES_BACK else "claimed")
    return marks
