"""Every case runs over every transport, on two and on three ranks; over MPI most run on three only."""

from __future__ import annotations

import pytest

from support import mpi
from support.conformance import TRANSPORTS, Ranks
from support.pool import Pool

# Where cases over MPI run on every number of ranks; elsewhere on three, as MPI's operations are tried here.
EVERY_SIZE = ("test_collectives.py",)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases over MPI that run on three ranks as well."""
    sizes = {item: _case_and_size(item) for item in items}
    on_three = {case for case, size in sizes.values() if size == 3}
    left_out = [item for item, (case, size) in sizes.items() if size not in (None, 3) and case in on_three]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def _case_and_size(item: pytest.Item) -> tuple[str, int | None]:
    """A case over MPI, and its number of ranks; None for any other, and where every number counts."""
    parameters = dict(getattr(item, "callspec").params) if hasattr(item, "callspec") else {}  # noqa: B009
    size = parameters.pop("size", None)
    if parameters.get("transport") != mpi.BACKEND or item.path.name in EVERY_SIZE:
        return "", None
    return f"{item.path}::{getattr(item, 'originalname', item.name)}{parameters}", size


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
