"""Every collective gives what follows from its inputs: every dtype, reduction, root, shape and
layout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.conformance import FITS, LAYOUTS, MOVABLE, PURE, TRANSPORTS, Case, Ranks, offered
from support.operations import MOVING, OPERATIONS, REDUCING, perform

with_pure = pytest.mark.parametrize("transport", [*TRANSPORTS, PURE])
WITH_VALUES = [name for name in OPERATIONS if name != "barrier"]
ROOTED = ("broadcast", "reduce", "gather", "scatter")

Call = tuple[str, Case]


def run(ranks: Ranks, calls: list[Call], **options: Any) -> None:
    own = [(name, case) for name, case in calls if offered(ranks.transport, name, [case])]
    ranks.run(perform_all, own, **options)


def perform_all(calls: list[Call]) -> None:
    """All calls, one after the other; those with a wrong result are named together."""
    wrong = []
    for name, case in calls:
        try:
            perform(name, case)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(calls)} went wrong:", *wrong[:20]])


@with_pure
def test_every_dtype_is_moved(ranks: Ranks) -> None:
    run(
        ranks,
        [
            (name, Case(dtype=dtype, seed=seed))
            for name in MOVING
            for seed, dtype in enumerate(MOVABLE)
        ],
    )


@with_pure
def test_every_reduction_of_every_dtype_that_it_fits(ranks: Ranks) -> None:
    cases = [
        Case(dtype=dtype, op=op, seed=seed)
        for op, dtypes in FITS.items()
        for seed, dtype in enumerate(dtypes)
    ]
    run(ranks, [(name, case) for name in REDUCING for case in cases])


@with_pure
def test_every_shape(ranks: Ranks) -> None:
    shapes = [(), (1,), (7,), (0,), (3, 0, 2), (1, 1), (2, 3, 4, 5)]
    run(
        ranks,
        [
            (name, Case(shape, seed=seed))
            for name in OPERATIONS
            for seed, shape in enumerate(shapes)
        ],
    )


@with_pure
def test_every_layout(ranks: Ranks) -> None:
    shapes = [(1,), (5,), (2, 3), (2, 3, 4, 5), (3, 1, 2)]
    cases = [Case(shape, layout=layout) for layout in LAYOUTS for shape in shapes]
    run(ranks, [(name, case) for name in WITH_VALUES for case in cases])


@with_pure
@pytest.mark.parametrize("size", [4])
def test_every_root_of_four(ranks: Ranks) -> None:
    cases = [Case(root=root, seed=root) for root in range(4)]
    run(
        ranks,
        [(name, case) for name in OPERATIONS for case in (cases if name in ROOTED else cases[:1])],
    )


# --- sizes
# --------------------------------------------------------------------------------------------------


@with_pure
def test_sizes_around_those_of_caches_and_chunks(ranks: Ranks) -> None:
    powers = (
        (13, 14, 16, 17) if ranks.transport in ("shm", PURE) else (14, 17)
    )  # chunks are shared memory's
    counts = [2**power + by for power in powers for by in (-1, 0, 1)]
    run(ranks, [(name, Case((count,))) for name in WITH_VALUES for count in (*counts, 2**19 + 1)])


@with_pure
@pytest.mark.parametrize(
    "operation", ["all_reduce", "broadcast", "reduce_scatter_tensor", "all_to_all", "ring"]
)
def test_tensors_larger_than_the_memory_between_ranks(ranks: Ranks, operation: str) -> None:
    run(ranks, [(operation, Case((1_500_000,))), (operation, Case((5_000_001,), torch.int8))])


@pytest.mark.parametrize("transport", ["shm", PURE])
def test_hardly_any_shared_memory(ranks: Ranks) -> None:
    """Chunks of some hundred elements, so that everything takes many."""
    counts = [count + by for count in (64, 128, 1024, 2048, 5000) for by in (-1, 0, 1)]
    cases = [
        Case((count,), dtype)
        for count in counts
        for dtype in (torch.float32, torch.bfloat16, torch.complex128)
    ]
    cases.append(Case((70, 3, 11), layout="mixed"))
    run(
        ranks,
        [(name, case) for name in WITH_VALUES for case in cases],
        env={"LOCKSTEP_SHM_SIZE": "100K"},
    )
