"""Where a test is given kernels, they are those of the process meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel_twins.implementations import using


@pytest.fixture(autouse=True)
def of_process(request: pytest.FixtureRequest) -> Iterator[None]:
    given = getattr(request.node, "callspec", None)
    if given is None or "kernels" not in given.params:
        yield
        return
    with using(given.params["kernels"]):
        yield
