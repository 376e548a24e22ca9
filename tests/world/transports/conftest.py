"""Every case runs over every transport, on two and on three ranks; over MPI and without compiled
parts on three.
"""

from __future__ import annotations

import pytest

from support import mpi
from support.conformance import PURE, TRANSPORTS, Ranks
from support.pool import Pool

# Where three ranks are enough: MPI's operations are not ours, and the Python form exchanges as the
# compiled one does.
ON_THREE = (mpi.BACKEND, PURE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of `ON_THREE` that run on three ranks as well."""
    sizes = {item: _case_and_size(item) for item in items}
    on_three = {case for case, size in sizes.values() if size == 3}
    left_out = [
        item for item, (case, size) in sizes.items() if size not in (None, 3) and case in on_three
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def _case_and_size(item: pytest.Item) -> tuple[str, int | None]:
    """A case over one of `ON_THREE`, and its number of ranks; None for any other."""
    parameters = dict(getattr(item, "callspec").params) if hasattr(item, "callspec") else {}  # noqa: B009
    size = parameters.pop("size", None)
    if parameters.get("transport") not in ON_THREE:
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
