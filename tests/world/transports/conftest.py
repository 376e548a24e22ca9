"""Every case runs over every transport, on two and on three ranks."""

from __future__ import annotations

import pytest

from support.conformance import TRANSPORTS, Ranks
from support.pool import Pool


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """The backend's name; a test that is not about all transports parametrizes it itself."""
    return str(request.param)


@pytest.fixture(params=[2, 3], ids="{} ranks".format)
def size(request: pytest.FixtureRequest) -> int:
    """The number of ranks."""
    return int(request.param)


@pytest.fixture
def ranks(pool: Pool, transport: str, size: int) -> Ranks:
    """The ranks of one job, whose default process group is of the transport."""
    return Ranks(pool, transport, size)
