"""The operations of Horovod's interface, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lockstep.compat.horovod.torch as hvd

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
]


def test_reductions(pool: Any) -> None:
    def body() -> dict[str, Any]:
        hvd.init()
        rank, found = hvd.rank(), {}
        for dtype in DTYPES:
            x = torch.tensor([1, 2, 4]).to(dtype) * (rank + 1)
            for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                found[f"{dtype} {op}"] = hvd.allreduce(x, op=op).tolist()
        x = torch.tensor([1.0, 2.0, 4.0]) * (rank + 1)
        found["average"] = hvd.allreduce(x, average=True).tolist()
        found["no average"] = hvd.allreduce(x, average=False).tolist()
        found["negative"] = hvd.allreduce(torch.tensor([-1 - rank])).tolist()
        found["factors"] = hvd.allreduce(
            x, prescale_factor=2.0, postscale_factor=0.5, op=hvd.Sum
        ).tolist()
        found["fp16"] = hvd.allreduce(x, compression=hvd.Compression.fp16).tolist()
        found["turned"] = hvd.allreduce(torch.arange(4.0).view(2, 2).t(), op=hvd.Sum).tolist()
        many = [torch.full((n,), float(rank)) for n in (1, 3, 100_000)] + [torch.tensor([rank])]
        found["group"] = [t[0].item() for t in hvd.grouped_allreduce(many, op=hvd.Sum)]
        found["group in place"] = [
            t is m for t, m in zip(hvd.grouped_allreduce_(many, op=hvd.Sum), many, strict=True)
        ]
        found["grouped"] = [t[-1].item() for t in many]
        found["empty"] = hvd.allreduce(torch.Tensor(), name="barrier").tolist()
        found["adasum"] = [
            t.tolist() for t in hvd.grouped_allreduce([x, torch.eye(2)[rank]], op=hvd.Adasum)
        ]
        hvd.shutdown()
        return found

    for found in pool.run(body, backend="shm"):
        for dtype in DTYPES:
            average = [1.5, 3.0, 6.0] if dtype.is_floating_point else [1, 3, 6]
            assert found[f"{dtype} {hvd.Average}"] == average
            assert found[f"{dtype} {hvd.Sum}"] == [3, 6, 12]
            assert found[f"{dtype} {hvd.Min}"] == [1, 2, 4]
            assert found[f"{dtype} {hvd.Max}"] == [2, 4, 8]
            assert found[f"{dtype} {hvd.Product}"] == [2, 8, 32]
        assert found["average"] == found["fp16"] == [1.5, 3.0, 6.0]
        assert found["negative"] == [-1]
        assert found["no average"] == found["factors"] == [3.0, 6.0, 12.0]
        assert found["turned"] == [[0.0, 4.0], [2.0, 6.0]]
        assert found["group"] == found["grouped"] == [1.0, 1.0, 1.0, 1]
        assert found["group in place"] == [True] * 4
        assert found["empty"] == []
        # parallel: their mean; orthogonal: their sum
        torch.testing.assert_close(torch.tensor(found["adasum"][0]), torch.tensor([1.5, 3.0, 6.0]))
        assert found["adasum"][1] == [1.0, 1.0]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_moves(pool: Any, backend: str) -> None:
    def body() -> dict[str, Any]:
        hvd.init()
        rank, found = hvd.rank(), {}
        x = torch.full((rank + 1, 2), rank)
        found["allgather"] = hvd.allgather(x).tolist()
        found["grouped"] = [
            t.tolist() for t in hvd.grouped_allgather([x[:, 0], torch.tensor([rank])])
        ]
        y = torch.arange(3.0) + 10 * rank
        found["broadcast"] = [hvd.broadcast(y, 1).tolist(), y.tolist()]
        hvd.broadcast_(y, 2)
        found["broadcast_"] = y.tolist()
        found["bool"] = hvd.broadcast(torch.tensor([rank == 0]), 0).tolist()
        found["alltoall"] = hvd.alltoall(torch.arange(3) + 10 * rank).tolist()
        splits = torch.tensor([0, 1, 2], dtype=torch.int32)
        received, counts = hvd.alltoall(torch.arange(3) + 10 * rank, splits)
        found["splits"] = [received.tolist(), counts.tolist(), counts.dtype]
        rows = torch.arange(8.0).view(4, 2)
        found["reducescatter"] = hvd.reducescatter(rows, op=hvd.Sum).tolist()
        found["average"] = [
            t.tolist() for t in hvd.grouped_reducescatter([rows, torch.tensor([1, 2, 4]) * rank])
        ]
        hvd.barrier()
        hvd.shutdown()
        return found

    for rank, found in enumerate(pool.run(body, workers=3, backend=backend)):
        assert found["allgather"] == [[0, 0], *[[1, 1]] * 2, *[[2, 2]] * 3]
        assert found["grouped"] == [[0, 1, 1, 2, 2, 2], [0, 1, 2]]
        assert found["broadcast"] == [
            [10.0, 11.0, 12.0],
            [10.0 * rank, 10.0 * rank + 1, 10.0 * rank + 2],
        ]
        assert found["broadcast_"] == [20.0, 21.0, 22.0]
        assert found["bool"] == [True]
        assert found["alltoall"] == [rank, 10 + rank, 20 + rank]
        sent = {0: [], 1: [0], 2: [1, 2]}[rank]
        assert found["splits"] == [
            [x + 10 * peer for peer in range(3) for x in sent],
            [rank] * 3,
            torch.int32,
        ]
        rows = {0: [[0.0, 3.0], [6.0, 9.0]], 1: [[12.0, 15.0]], 2: [[18.0, 21.0]]}[rank]
        assert found["reducescatter"] == [[3 * x / 3 * 1 for x in row] for row in rows]
        assert found["average"] == [[[x / 3 for x in row] for row in rows], [[1], [2], [4]][rank]]


def test_named_operations_in_different_orders(pool: Any) -> None:
    def body() -> list[float]:
        hvd.init()
        rank = hvd.rank()
        names = [f"{number}" for number in range(80)]  # more than one cycle announces
        order = names if rank == 0 else names[::-1] if rank == 1 else names[40:] + names[:40]
        handles = {
            name: hvd.allreduce_async(torch.tensor([float(name) + rank]), name=name)
            for name in order
        }
        found = [
            hvd.synchronize(handles[name]).item() for name in (names if rank != 2 else names[::-1])
        ]
        # one that waits for what the others ask for last
        if rank == 0:
            waiting = hvd.allreduce_async_(torch.ones(1), name="early")
            hvd.barrier()
        else:
            hvd.barrier()
            waiting = hvd.allreduce_async_(torch.ones(1), name="early")
        found.append(hvd.synchronize(waiting).item())
        hvd.shutdown()
        return found if rank != 2 else found[:-1][::-1] + found[-1:]

    for found in pool.run(body, workers=3, backend="shm"):
        assert found == [number + 1.0 for number in range(80)] + [1.0]


def test_waiting_for_different_things_at_once(pool: Any) -> None:
    """Every rank waits for what the other has not asked for yet, with nothing new to say."""

    def body() -> list[float]:
        hvd.init()
        first, second = ("a", "b") if hvd.rank() == 0 else ("b", "a")
        early = hvd.allreduce_async(torch.ones(1), name=first)
        while not hvd.poll(early) and not seen():
            pass
        found = [hvd.allreduce(torch.ones(1), name=second).item(), hvd.synchronize(early).item()]
        hvd.shutdown()
        return found

    def seen() -> bool:
        """Whether this rank knows that the other has asked for the other one."""
        return bool(hvd.global_process_set.engine._backoff_s)

    assert pool.run(body, backend="shm") == [[1.0, 1.0]] * 2


def test_join(pool: Any) -> None:
    def body() -> dict[str, Any]:
        hvd.init()
        rank, found = hvd.rank(), {}
        found["sums"] = [hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() for _ in range(rank + 1)]
        if rank == 2:
            found["average"] = hvd.allreduce(torch.full((1,), 3.0)).tolist()
            found["group"] = [
                t.tolist()
                for t in hvd.grouped_allreduce([torch.tensor([6]), torch.ones(1)], op=hvd.Sum)
            ]
            found["max"] = hvd.allreduce(torch.tensor([-1.0]), op=hvd.Max).tolist()
            found["adasum"] = hvd.allreduce(torch.tensor([2.0]), op=hvd.Adasum).tolist()
            with pytest.raises(
                hvd.HorovodInternalError,
                match="allgather 'x' needs all ranks, but ranks 0 and 1 have",
            ):
                hvd.allgather(torch.ones(1), name="x")
        found["last"] = hvd.join()
        found["after"] = hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist()  # named alike again
        found["again"] = hvd.join() in range(3)
        hvd.shutdown()
        return found

    answers = pool.run(body, workers=3, backend="shm")
    assert [answer["sums"] for answer in answers] == [
        [[3.0, 3.0]],
        [[3.0, 3.0], [2.0, 2.0]],
        [[3.0, 3.0], [2.0, 2.0], [1.0, 1.0]],
    ]
    assert [answer["last"] for answer in answers] == [2, 2, 2]
    assert [answer["after"] for answer in answers] == [[3.0]] * 3
    assert all(answer["again"] for answer in answers)
    last = answers[2]
    assert (last["average"], last["group"], last["max"], last["adasum"]) == (
        [1.0],
        [[6], [1.0]],
        [-1.0],
        [2.0],
    )


def test_gradients(pool: Any) -> None:
    """Those of moves are averages over the ranks, as scripts have it in their learning rates."""

    def body() -> dict[str, list[float]]:
        hvd.init()
        rank, found = hvd.rank(), {}
        part = hvd.add_process_set([0, 2])

        def gradient(name: str, function: Any, rows: int = 3) -> None:
            x = torch.ones(rows, requires_grad=True)
            result = function(x)
            (result * (torch.arange(len(result)) + 1.0 + 10 * rank)).sum().backward()
            assert x.grad is not None
            found[name] = x.grad.tolist()

        gradient("sum", lambda x: hvd.allreduce(x, op=hvd.Sum))
        gradient("average", hvd.allreduce)
        gradient("prescale", lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0))
        gradient("group", lambda x: sum(hvd.grouped_allreduce([x, x], op=hvd.Sum)))
        gradient("allgather", hvd.allgather, rows=rank + 1)
        gradient(
            "grouped allgather",
            lambda x: torch.cat(hvd.grouped_allgather([x, x[:1]])),
            rows=rank + 1,
        )
        gradient("broadcast", lambda x: hvd.broadcast(x, 1))
        gradient("alltoall", hvd.alltoall)
        gradient("splits", lambda x: hvd.alltoall(x, torch.tensor([0, 2, 1]))[0])
        gradient("reducescatter", hvd.reducescatter)
        gradient("reducescatter sum", lambda x: hvd.reducescatter(x, op=hvd.Sum))
        factors = {"prescale_factor": 3.0, "postscale_factor": 0.5}
        gradient("reducescatter factors", lambda x: hvd.reducescatter(x, op=hvd.Sum, **factors))
        gradient("grouped reducescatter", lambda x: hvd.grouped_reducescatter([x, x], **factors)[1])
        gradient("bf16", lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16))
        if part.included():
            gradient("part allgather", lambda x: hvd.allgather(x, process_set=part), rows=1)
            gradient("part broadcast", lambda x: hvd.broadcast(x, 2, process_set=part), rows=1)
            gradient(
                "part scatter", lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=part), rows=2
            )
        hvd.shutdown()
        return found

    answers = pool.run(body, workers=3, backend="shm")
    first, second, third = answers
    for rank, found in enumerate(answers):
        assert found["sum"] == [33.0, 36.0, 39.0]  # [1, 2, 3] + [11, 12, 13] + [21, 22, 23]
        assert found["average"] == found["bf16"] == [11.0, 12.0, 13.0]
        assert found["prescale"] == found["group"] == [66.0, 72.0, 78.0]
        assert found["broadcast"] == ([11.0, 12.0, 13.0] if rank == 1 else [0.0] * 3)
        assert found["alltoall"] == [rank + 1.0, rank + 11.0, rank + 21.0]
        assert found["reducescatter"] == [1.0, 11.0, 21.0]
        assert found["reducescatter sum"] == [3.0, 33.0, 63.0]
        assert found["reducescatter factors"] == [4.5, 49.5, 94.5]
        assert found["grouped reducescatter"] == [1.5, 16.5, 31.5]
    assert [found["allgather"] for found in answers] == [[11.0], [12.0, 13.0], [14.0, 15.0, 16.0]]
    # 7 to 9 are the weights of the second tensor's rows
    assert [found["grouped allgather"] for found in answers] == [
        [28.0],
        [30.0, 13.0],
        [33.0, 15.0, 16.0],
    ]
    assert [found["splits"] for found in answers] == [
        [11.0, 12.0, 21.0],
        [13.0, 14.0, 22.0],
        [15.0, 16.0, 23.0],
    ]
    assert (first["part allgather"], third["part allgather"]) == ([11.0], [12.0])
    assert (first["part broadcast"], third["part broadcast"]) == ([0.0], [11.0])
    assert first["part scatter"] == third["part scatter"] == [2.0, 42.0]
    assert "part scatter" not in second


def test_gradients_of_gradients(pool: Any) -> None:
    """As a penalty on the gradient's norm has them; a reduction must not end the graph in
    silence.
    """

    def body() -> dict[str, list[float]]:
        hvd.init()
        rank, found = hvd.rank(), {}

        def second(name: str, function: Any) -> None:
            x = torch.tensor([1.0, 2.0], requires_grad=True)
            (slope,) = torch.autograd.grad((function(x) ** 3).sum(), x, create_graph=True)
            (found_here,) = torch.autograd.grad((slope * (rank + 1.0)).sum(), x)
            found[name] = found_here.tolist()

        second("allreduce", hvd.allreduce)
        second("grouped", lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[0])
        second("allgather", lambda x: hvd.allgather(x)[:2])
        second("broadcast", lambda x: hvd.broadcast(x, 1))
        hvd.shutdown()
        return found

    first, last = pool.run(body, backend="shm")
    # 6 y y' times the mean of the weights 1 and 2, through a second mean
    assert first["allreduce"] == last["allreduce"] == [9.0, 18.0]
    assert (
        first["grouped"] == last["grouped"] == [72.0, 144.0]
    )  # twice three sums in place of means
    # only the root's slope is not zero: its weight alone counts, as half of the weights
    assert (first["broadcast"], last["broadcast"]) == ([0.0, 0.0], [6.0, 12.0])
    assert (first["allgather"], last["allgather"]) == ([3.0, 6.0], [0.0, 0.0])


def test_sparse(pool: Any) -> None:
    def body() -> list[Any]:
        hvd.init()
        rank = hvd.rank()
        x = (
            torch.zeros(4)
            .index_put((torch.tensor([0, rank + 1]),), torch.tensor([1.0, 4.0]))
            .to_sparse()
        )
        both = [
            hvd.sparse_allreduce_async(x, f"{op}", op)().to_dense().tolist()
            for op in (hvd.Sum, hvd.Average)
        ]
        hvd.shutdown()
        return both

    for found in pool.run(body):
        assert found == [[2.0, 4.0, 4.0, 0.0], [1.0, 2.0, 2.0, 0.0]]


def test_init_and_shutdown_many_times(pool: Any) -> None:
    def body(initialised: bool) -> list[float]:
        found = []
        for number in range(12):
            hvd.init()
            found.append(hvd.allreduce(torch.tensor([float(number)])).item())
            hvd.shutdown()
        return found

    assert (
        pool.run(body, True, workers=3, backend="gloo")
        == [[float(number) for number in range(12)]] * 3
    )
    assert (
        pool.run(body, False, workers=2, init=False)
        == [[float(number) for number in range(12)]] * 2
    )


def test_part_of_the_ranks(pool: Any) -> None:
    class Members:
        """What is used of a communicator of mpi4py."""

        def __init__(self, ranks: list[int], rank: int) -> None:
            self.ranks, self.rank = ranks, rank

        def Get_rank(self) -> int:  # noqa: N802, as mpi4py calls it
            return self.ranks.index(self.rank)

        def allgather(self, value: int) -> list[int]:
            assert value == self.rank
            return self.ranks

    def body(as_communicator: bool) -> tuple[int, int, float]:
        import torch.distributed as dist

        me = dist.get_rank()
        ranks = [2, 0] if me != 1 else [1]
        hvd.init(comm=Members(ranks, me) if as_communicator else ranks)
        found = hvd.rank(), hvd.size(), hvd.allreduce(torch.tensor([float(me)]), op=hvd.Sum).item()
        hvd.shutdown()
        return found

    for as_communicator in (False, True):
        assert pool.run(body, as_communicator, workers=3) == [(1, 2, 2.0), (0, 1, 1.0), (0, 2, 2.0)]
