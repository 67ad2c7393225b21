"""Aim: a store on S3 keeps the contract of every store, and HEAD lives in it as in any.

Method: the suites of the other stores, on a real server; calls of random order against a dict.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given

from penstock.errors import StoreTransient
from penstock.storage.object_store import delete_all
from penstock.storage.s3.s3_store import S3Store
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.examples import examples
from tests.support.radosgw import RadosGateway
from tests.unit.penstock.storage import test_head_store as of_head
from tests.unit.penstock.storage import test_object_stores as of_stores

pytestmark = pytest.mark.integration

test_what_was_put_is_there = of_stores.test_what_was_put_is_there
test_an_empty_object_is_an_object = of_stores.test_an_empty_object_is_an_object
test_words_count_as_their_bytes = of_stores.test_words_count_as_their_bytes
test_what_is_not_there = of_stores.test_what_is_not_there
test_a_range_beyond_the_end_is_damage = of_stores.test_a_range_beyond_the_end_is_damage
test_ranges_come_in_order_and_few_of_them_ahead = (
    of_stores.test_ranges_come_in_order_and_few_of_them_ahead
)
test_listings_go_by_prefix = of_stores.test_listings_go_by_prefix
test_deleted_is_deleted = of_stores.test_deleted_is_deleted
test_many_are_deleted_at_once = of_stores.test_many_are_deleted_at_once
test_first_parts_are_named_once = of_stores.test_first_parts_are_named_once
test_of_an_emptied_store_nothing_remains = of_stores.test_of_an_emptied_store_nothing_remains
test_no_path_leaves_the_store = of_stores.test_no_path_leaves_the_store
test_no_listing_leaves_the_store = of_stores.test_no_listing_leaves_the_store
test_a_swap_needs_what_it_expects = of_stores.test_a_swap_needs_what_it_expects
test_a_failing_source_leaves_nothing = of_stores.test_a_failing_source_leaves_nothing

test_the_first_claim_makes_it = of_head.test_the_first_claim_makes_it
test_a_leader_can_see_that_it_leads = of_head.test_a_leader_can_see_that_it_leads
test_a_head_that_is_gone_is_not_made_again = of_head.test_a_head_that_is_gone_is_not_made_again
test_manifests_are_found_newest_first = of_head.test_manifests_are_found_newest_first


@examples(4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=of_stores.CALLS)
def test_a_store_is_a_dict(make_store: of_stores.MakeStore, calls: list[Any]) -> None:
    of_stores.test_a_store_is_a_dict.hypothesis.inner_test(make_store, calls)


def test_what_cannot_be_deleted_is_named_and_holds_up_nothing(
    s3_server: RadosGateway,
) -> None:
    store = S3Store(BUCKET, "held/job", settings_of(s3_server.endpoint))
    for name in ("a", "b", "c"):
        store.put(name, [b"1"])
    refusal = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:DeleteObject",
        "Resource": f"arn:aws:s3:::{BUCKET}/held/job/a",
    }
    policy = {"Version": "2012-10-17", "Statement": [refusal]}
    client = s3_server.client()
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))
    try:
        left = store.delete_many(["a", "b"])
        assert list(left) == ["a"]
        with pytest.raises(StoreTransient, match=r"job/a cannot be removed: AccessDenied"):
            delete_all(store, ["a", "c"])
    finally:
        client.delete_bucket_policy(Bucket=BUCKET)
    assert [info.path for info in store.list("")] == ["a"]
