"""Training with Horovod's interface gives the result of one rank with all data."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import lockstep.compat.horovod.torch as hvd
from lockstep.communicator.adasum import combine
from lockstep.compat.horovod.engine import engine
from lockstep.compat.horovod.engine.negotiation import NegotiationMessages

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unnamed": {"named": False},
    "predivide": {"gradient_predivide_factor": 4.0},
    "one group": {"groups": 1},
    "two groups": {"groups": 2},
    "bf16": {"compression": hvd.Compression.bf16},
    "two passes": {"backward_passes_per_step": 2},
    "sum": {"op": hvd.Sum},
}


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2), nn.Linear(2, 2))


def data_of(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + number))


def trained(options: dict[str, Any], ranks: list[int], distributed: bool) -> list[torch.Tensor]:
    """The parameters after three steps; the last layer takes part on the first rank only."""
    model, options = model_of(), dict(options)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    passes = options.get("backward_passes_per_step", 1)
    if distributed:
        named = options.pop("named", True)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters() if named else None, **options
        )
    for step in range(3):
        optimizer.zero_grad()
        for number in range(passes):
            for rank in ranks:
                inner = model[:3](data_of(rank, step * passes + number))
                loss = (inner if rank else model[3](inner)).square().mean()
                (
                    loss if distributed or options.get("op") == hvd.Sum else loss / len(ranks)
                ).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_every_option_gives_what_one_rank_would_get(pool: Any) -> None:
    def body() -> dict[str, list[torch.Tensor]]:
        hvd.init()
        found = {name: trained(options, [hvd.rank()], True) for name, options in OPTIONS.items()}
        hvd.shutdown()
        return found

    first, second = pool.run(body, backend="shm")
    for name, options in OPTIONS.items():
        tolerance = 2e-2 if name == "bf16" else 1e-5
        for a, b, right in zip(
            first[name], second[name], trained(options, [0, 1], False), strict=True
        ):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_parameters_added_later_are_trained_the_same_on_all_workers(pool: Any, op: int) -> None:
    """One layer is thawed after the first step, another is given to the optimizer only then."""

    def body() -> list[torch.Tensor]:
        hvd.init()
        model = model_of()
        model[2].requires_grad_(False)
        inner = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, list(model.named_parameters())[:4], op=op)
        for step in range(3):
            optimizer.zero_grad()
            model(data_of(hvd.rank(), step)).square().mean().backward()
            optimizer.step()
            if step == 0:
                model[2].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.05})
        hvd.shutdown()
        return [p.detach() for p in model.parameters()]

    first, second = pool.run(body, backend="shm")
    for a, b, start in zip(first, second, model_of().parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, start)


def test_groups_of_parameters_and_a_class_of_the_users_own(pool: Any) -> None:
    class Halved:
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
            return tensor / 2, 2.0

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: float) -> torch.Tensor:
            return tensor * ctx

    def body() -> list[list[float]]:
        hvd.init()
        model = nn.Linear(2, 1)
        nn.init.zeros_(model.weight)
        groups = [[model.weight, model.bias]]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            inner, model.named_parameters(), groups=groups, compression=Halved
        )
        model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
        optimizer.step()
        hvd.shutdown()
        return model.weight.tolist()

    assert pool.run(body) == [[[-0.5, -0.5]]] * 2


def test_gradients_are_sent_while_the_backward_pass_runs(pool: Any) -> None:
    """A rank's first gradient is reduced before its backward pass has come to the last."""

    def body() -> bool:
        hvd.init()
        big = nn.Parameter(torch.zeros(1 << 19))  # 2 MiB
        reduced = threading.Event()

        class Wait(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                engine = hvd.global_process_set.engine
                while not reduced.is_set():
                    if not engine._requests:
                        reduced.set()
                return gradient

        first = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, big], lr=1.0))
        (Wait.apply(first * 1.0) + big).sum().backward()  # that of `big` comes first
        optimizer.step()
        hvd.shutdown()
        return reduced.is_set()

    assert pool.run(body, backend="shm") == [True, True]


def test_synchronize_and_what_is_refused(pool: Any) -> None:
    def body() -> list[float]:
        hvd.init()
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
        )

        def backward() -> None:
            model(torch.full((1, 1), 1.0 + hvd.rank())).sum().backward()

        backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after backward"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            backward()
        optimizer.synchronize()
        assert model.weight.grad is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        found = [model.weight.item()]
        optimizer.zero_grad(set_to_none=False)
        optimizer.synchronize()
        with pytest.warns(
            UserWarning,
            match=r"^optimizer\.step\(\) called without optimizer\.skip_synchronize\(\)",
        ):
            optimizer.step()
        optimizer.set_backward_passes_per_step(2)
        optimizer.zero_grad()
        backward()
        backward()
        optimizer.step()
        found.append(model.weight.item())
        optimizer.set_backward_passes_per_step(1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            backward()
            return torch.tensor(7.0)

        assert optimizer.step(closure).item() == 7.0
        found.append(model.weight.item())
        hvd.shutdown()
        return found

    found = pool.run(body, backend="shm")
    assert found[0] == found[1] == pytest.approx([-0.5, -3.5, -5.0], abs=1e-5)


def test_an_optimizer_that_is_gone_reduces_nothing(pool: Any) -> None:
    """Otherwise its reduction would have the name of that of the next one for these parameters."""

    def body() -> float:
        hvd.init()
        p = nn.Parameter(torch.zeros(1))
        for _ in range(3):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)])
            optimizer.zero_grad()
            (p * (1.0 + hvd.rank())).sum().backward()
            optimizer.step()
            del optimizer
            gc.collect()
        (p * 1.0).sum().backward()
        hvd.shutdown()
        return p.item()

    assert pool.run(body, backend="shm") == [-4.5, -4.5]


def test_ranks_that_join_between_a_backward_pass_and_its_step(pool: Any) -> None:
    def body() -> float:
        hvd.init()
        p = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)])
        reduction = optimizer._reduction
        reduction.is_alone = lambda: True
        for factor in (7.0, 1.0 + hvd.rank()):  # the second gradient is in another tensor
            optimizer.zero_grad()
            (p * factor).sum().backward()
        del reduction.is_alone
        optimizer.step()
        hvd.shutdown()
        return p.item()

    assert pool.run(body, backend="shm") == [-1.5, -1.5]


def test_sparse_gradients(pool: Any) -> None:
    def body(as_dense: bool) -> list[list[float]]:
        hvd.init()
        table = nn.Embedding(3, 1, sparse=True)
        nn.init.zeros_(table.weight)
        inner = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            inner, table.named_parameters(), sparse_as_dense=as_dense
        )
        table(torch.tensor([0, hvd.rank() + 1])).sum().backward()
        optimizer.step()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        optimizer.zero_grad()
        if hvd.rank() == 0:  # the other has none this time
            (
                table(torch.tensor([2])) * torch.ones(1)
            ).sum().backward()  # torch takes no one row of a plain sum
        optimizer.step()
        hvd.shutdown()
        return table.weight.tolist()

    for as_dense in (False, True):
        assert pool.run(body, as_dense) == [[[-1.0], [-0.5], [-1.0]]] * 2


def test_sparse_gradients_are_negotiated_together_with_the_others(pool: Any) -> None:
    def body() -> list[int]:
        engine._IDLE_S = 60.0  # type: ignore[attr-defined]  # how long a busy host takes decides nothing
        negotiated: list[int] = []
        exchange = NegotiationMessages.exchange

        def counting(self: NegotiationMessages, messages: Any) -> Any:
            negotiated.append(len(messages))
            return exchange(self, messages)

        NegotiationMessages.exchange = counting  # type: ignore[method-assign]
        try:
            hvd.init()
            table, layer = nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1)
            inner = torch.optim.SGD([*table.parameters(), *layer.parameters()], lr=1.0)
            optimizer = hvd.DistributedOptimizer(inner)
            negotiated.clear()
            for step in range(3):
                optimizer.zero_grad()
                layer(table(torch.tensor([0, hvd.rank() + 1]))).sum().backward()
                time.sleep(0.2)  # in which a thread would negotiate what cannot wait
                assert len(negotiated) == step
                optimizer.step()
            found = list(negotiated)
            hvd.shutdown()
        finally:
            NegotiationMessages.exchange = exchange  # type: ignore[method-assign]
            engine._IDLE_S = 0.05  # type: ignore[attr-defined]
        return found

    assert pool.run(body, backend="shm") == [[4, 4, 4]] * 2  # indices, values, weight and bias


def test_adasum_combines_what_steps_change(pool: Any) -> None:
    def body() -> list[torch.Tensor]:
        hvd.init()
        model = model_of()
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Adasum)
        assert isinstance(optimizer, torch.optim.Adam)
        with pytest.raises(AssertionError, match="skip_synchronize"):
            optimizer.skip_synchronize()
        model(data_of(hvd.rank(), 0)).square().sum().backward()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            model(data_of(hvd.rank(), 0)).square().sum().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        hvd.shutdown()
        return [p.detach() for p in model.parameters()]

    first, second = pool.run(body, backend="shm")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for a, start in zip(first, model_of().parameters(), strict=True):
        # Adam's first step changes each number by the learning rate: two such changes are summed at
        # most
        assert 0 < (a - start).abs().max() <= 0.0201


def test_adasum_by_hand(pool: Any) -> None:
    def body() -> list[float]:
        hvd.init()
        p = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), [("p", p)], op=hvd.Adasum
        )
        (p * torch.tensor([[1.0, 0.0], [1.0, 1.0]][hvd.rank()])).sum().backward()
        optimizer.step()
        hvd.shutdown()
        return p.tolist()

    right = -combine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))
    for found in pool.run(body):
        torch.testing.assert_close(torch.tensor(found), right)


def test_ranks_outside_the_process_set_train_by_themselves(pool: Any) -> None:
    def body() -> float:
        hvd.init()
        pair = hvd.add_process_set([0, 2])
        p = nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), [("p", p)], process_set=pair
        )
        (p * float(hvd.rank())).sum().backward()
        optimizer.step()
        hvd.shutdown()
        return p.item()

    assert pool.run(body, workers=3, backend="shm") == [-1.0, -1.0, -1.0]


def test_parameters_states_and_objects_come_from_the_root(pool: Any) -> None:
    def body() -> dict[str, Any]:
        hvd.init()
        rank, found = hvd.rank(), {}
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        for given in (
            model.state_dict(),
            list(model.named_parameters()),
            model.parameters(),
            model.named_buffers(),
        ):
            hvd.broadcast_parameters(given, 1)
        found["model"] = [tensor.tolist() for tensor in model.state_dict().values()]
        optimizer = torch.optim.Adam(
            model.parameters(), lr=0.1 * (rank + 1), betas=(0.1 * rank, 0.9)
        )
        if rank == 1:  # the other one has no state yet
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), 1)
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_optimizer_state(wrapped, 1)
        state = optimizer.state_dict()
        found["options"] = (state["param_groups"][0]["lr"], state["param_groups"][0]["betas"])
        found["state"] = [
            [value.tolist() for value in each.values()] for each in state["state"].values()
        ]
        found["object"] = hvd.broadcast_object({"a": [rank]} if rank else None, 1, name="o")
        found["function"] = hvd.broadcast_object_fn(0)(lambda: rank)()
        found["objects"] = hvd.allgather_object({"rank": rank}, name="o")
        hvd.shutdown()
        return found

    first, second = pool.run(body, backend="shm")
    assert first == second
    assert first["options"] == (0.2, (0.1, 0.9))
    assert len(first["state"]) == 4
    assert first["object"] == {"a": [1]}
    assert first["function"] == 0
    assert first["objects"] == [{"rank": 0}, {"rank": 1}]


def test_sync_batch_norm_has_the_statistics_of_all_samples(pool: Any) -> None:
    data = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(1))

    def body() -> list[torch.Tensor]:
        hvd.init()
        rank = hvd.rank()
        layer = hvd.SyncBatchNorm(3, eps=1e-4, momentum=0.3)
        x = (data[:5] if rank == 0 else data[5:]).clone().requires_grad_()
        output = layer(x)
        (output * torch.arange(2.0)).square().sum().backward()
        hvd.shutdown()
        assert x.grad is not None
        assert layer.running_mean is not None
        return [output.detach(), x.grad, layer.running_mean]

    layer = nn.BatchNorm1d(3, eps=1e-4, momentum=0.3)
    x = data.clone().requires_grad_()
    output = layer(x)
    (output * torch.arange(2.0)).square().sum().backward()
    first, second = pool.run(body, backend="shm")
    for number, whole in enumerate((output, x.grad)):
        torch.testing.assert_close(
            torch.cat([first[number], second[number]]), whole, rtol=1e-4, atol=1e-5
        )
    torch.testing.assert_close(first[2], layer.running_mean)
