"""The compatibility layer for Horovod in a job of one rank: every name works; wrong arguments are
ValueErrors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lockstep.compat.horovod.torch as hvd
from lockstep.parallel.optimizer_parts import set_part


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize(
    "ask", ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"]
)
def test_before_init(ask: str) -> None:
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        getattr(hvd, ask)()


def test_operations_before_init() -> None:
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.allreduce(torch.ones(1))
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0))
    assert hvd.global_process_set.ranks == []
    hvd.shutdown()  # does nothing


def test_init_again_after_shutdown() -> None:
    for _ in range(50):
        assert not hvd.is_initialized()
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        hvd.shutdown()


@pytest.mark.usefixtures("job")
def test_place() -> None:
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)


@pytest.mark.usefixtures("job")
def test_what_it_is_built_with() -> None:
    built = (hvd.mpi_enabled(), hvd.mpi_built(), hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built())
    assert built[:4] == (False, False, False, False)
    assert isinstance(built[4], bool)
    assert hvd.gloo_enabled()
    assert hvd.gloo_built()
    assert isinstance(hvd.cuda_built(), bool)
    assert isinstance(hvd.nccl_built(), int)
    with pytest.raises(ValueError, match="mpi_threads_supported"):
        hvd.mpi_threads_supported()


@pytest.mark.usefixtures("job")
def test_every_operation_answers_as_for_one_rank() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        assert torch.equal(hvd.allreduce(x, op=op), x)
    assert torch.equal(hvd.allgather(x), x)
    assert torch.equal(hvd.broadcast(x, 0), x)
    assert torch.equal(hvd.alltoall(x), x)
    received, counts = hvd.alltoall(x, torch.tensor([3], dtype=torch.int32))
    assert torch.equal(received, x)
    assert counts.tolist() == [3]
    assert torch.equal(hvd.reducescatter(x), x)
    assert hvd.join() == 0
    hvd.barrier()
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert hvd.allgather_object("x") == ["x"]


@pytest.mark.usefixtures("job")
def test_results_are_not_the_inputs() -> None:
    x = torch.ones(2)
    found = [
        hvd.allreduce(x),
        hvd.allgather(x),
        hvd.broadcast(x, 0),
        hvd.reducescatter(x),
        hvd.alltoall(x),
    ]
    for tensor in found:
        tensor += 1
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("job")
def test_forms_of_results() -> None:
    pair = [torch.ones(2), torch.ones(3)]
    assert isinstance(hvd.grouped_allreduce(pair), list)
    assert isinstance(hvd.grouped_allreduce_(pair), tuple)
    assert isinstance(hvd.synchronize(hvd.grouped_allreduce_async(pair)), tuple)
    assert hvd.synchronize(hvd.grouped_allreduce_async_(pair))[0] is pair[0]
    assert hvd.allreduce_(pair[0]) is pair[0]
    assert hvd.synchronize(hvd.allreduce_async_(pair[0])) is pair[0]
    assert hvd.broadcast_(pair[0], 0) is pair[0]
    assert hvd.synchronize(hvd.broadcast_async_(pair[0], 0)) is pair[0]
    output, counts = hvd.synchronize(hvd.alltoall_async(pair[0]))
    assert (output.tolist(), counts.tolist(), counts.dtype) == ([1.0, 1.0], [2], torch.int32)


@pytest.mark.usefixtures("job")
def test_handles() -> None:
    handle = hvd.allreduce_async(torch.ones(2), name="x")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(12345) is None
    assert hvd.poll(12345)


@pytest.mark.usefixtures("job")
def test_factors() -> None:
    assert hvd.allreduce(torch.ones(1), prescale_factor=3.0, postscale_factor=0.5).item() == 1.5
    assert hvd.allreduce(torch.tensor([5, -5]), postscale_factor=0.5).tolist() == [2, -2]
    assert hvd.reducescatter(torch.ones(1), prescale_factor=3.0, postscale_factor=0.5).item() == 1.5


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.allreduce(torch.ones(1), op=hvd.Sum, average=True),
        lambda: hvd.allreduce(torch.ones(1), op=17),
        lambda: hvd.allreduce([1.0]),
        lambda: hvd.allreduce_async(torch.ones(1, dtype=torch.bool)),
        lambda: hvd.allreduce(torch.ones(1, dtype=torch.int64), op=hvd.Adasum),
        lambda: hvd.allreduce(torch.ones(1, dtype=torch.complex64), op=hvd.Max),
        lambda: hvd.allreduce(torch.eye(2).to_sparse()),
        lambda: hvd.grouped_allreduce([]),
        lambda: hvd.grouped_allreduce(torch.ones(2)),
        lambda: hvd.allgather(torch.tensor(1.0)),
        lambda: hvd.broadcast(torch.ones(1), 1),
        lambda: hvd.alltoall(torch.tensor(1.0)),
        lambda: hvd.alltoall(torch.ones(3), torch.tensor([2])),
        lambda: hvd.alltoall(torch.ones(3), torch.tensor([3.0])),
        lambda: hvd.alltoall(torch.ones(3), torch.tensor([4, -1])),
        lambda: hvd.alltoall(torch.ones(3), [3.9]),
        lambda: hvd.allreduce(torch.ones(1), prescale_factor="2"),
        lambda: hvd.reducescatter(torch.ones(1), postscale_factor=None),
        lambda: hvd.ProcessSet([True]),
        lambda: hvd.ProcessSet(0),
        lambda: hvd.start_timeline(None),
        lambda: hvd.reducescatter(torch.tensor(1.0)),
        lambda: hvd.reducescatter(torch.ones(2), op=hvd.Max),
        lambda: hvd.sparse_allreduce_async(torch.ones(2), "x", hvd.Sum),
        lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "x", hvd.Min),
        lambda: hvd.broadcast_parameters(3, 0),
        lambda: hvd.broadcast_parameters({"a": 3}, 0),
        lambda: hvd.broadcast_optimizer_state(
            torch.optim.LBFGS([torch.ones(1, requires_grad=True)]), 0
        ),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.add_process_set([0, 1]),
        lambda: hvd.add_process_set([]),
        lambda: hvd.ProcessSet([0, 0]),
        lambda: hvd.ProcessSet([0]).size(),
        lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])),
        lambda: hvd.allreduce(torch.ones(1), process_set=0),
        lambda: hvd.alltoall(torch.ones(1), process_set=None),
        lambda: hvd.broadcast(torch.ones(1), 0, process_set=[0]),
        lambda: hvd.broadcast_object(1, process_set=[0]),
        lambda: hvd.barrier([0]),
        lambda: hvd.add_process_set("ab"),
        lambda: hvd.add_process_set([0.0]),
        lambda: hvd.remove_process_set(1),
    ],
)
def test_wrong_arguments(call: Any) -> None:
    with pytest.raises(ValueError, match=": expected"):
        call()


@pytest.mark.usefixtures("job")
def test_an_optimizer_with_a_part_of_its_state_is_refused() -> None:
    """The parameters whose state other workers have would begin anew."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    set_part(optimizer, {"worker": "rank 0 of 2 workers", "parameters": [0]})
    for call in (hvd.DistributedOptimizer, lambda part: hvd.broadcast_optimizer_state(part, 0)):
        with pytest.raises(ValueError, match="got the part of a state that rank 0 of 2 workers"):
            call(optimizer)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("op", [hvd.Adasum, hvd.Max])
def test_a_reduce_scatter_that_there_is_not(op: int) -> None:
    """Scripts for Horovod catch a RuntimeError; NotImplementedError is one."""
    for call in (hvd.reducescatter, hvd.reducescatter_async):
        with pytest.raises(NotImplementedError, match=r"op: expected hvd\.Average or hvd\.Sum"):
            call(torch.ones(2), op=op)
    with pytest.raises(NotImplementedError, match=r"op: expected hvd\.Average or hvd\.Sum"):
        hvd.grouped_reducescatter([torch.ones(2)], op=op)


@pytest.mark.usefixtures("job")
def test_gradients_are_zeros_once_an_empty_state_has_been_sent() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(3, 2, sparse=True), "layer": nn.Linear(2, 1)})
    model["layer"].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1.0)
    before = [p.tolist() for p in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    assert model["table"].weight.grad.is_sparse
    assert model["layer"].weight.grad.tolist() == [[0.0, 0.0]]
    assert model["layer"].bias.grad is None
    assert [p.tolist() for p in model.parameters()] == before
    single = torch.optim.SparseAdam([torch.ones(2, 2, requires_grad=True)])
    hvd.broadcast_optimizer_state(single, 0)
    assert single.param_groups[0]["params"][0].grad.is_sparse


@pytest.mark.parametrize(
    "wrong", [{"process_sets": "static"}, {"process_sets": [[0], [0]]}, {"comm": [1]}]
)
def test_wrong_arguments_of_init(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=": expected"):
        hvd.init(**wrong)
    assert not hvd.is_initialized()


@pytest.mark.usefixtures("job")
def test_gradients() -> None:
    x = torch.arange(3.0, requires_grad=True)
    total = hvd.allreduce(x, op=hvd.Sum) + hvd.allgather(x) + hvd.broadcast(x, 0) + hvd.alltoall(x)
    (total + hvd.reducescatter(x) + sum(hvd.grouped_allreduce([x, x * 2]))).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [8.0, 8.0, 8.0]
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad


def test_compression() -> None:
    x = torch.tensor([1.0, 2.0**20])
    for kind, dtype in (
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
    ):
        packed, ctx = kind.compress(x)
        assert packed.dtype is dtype
        assert kind.decompress(packed, ctx).dtype is torch.float32
        whole, ctx = kind.compress(torch.tensor([1]))
        assert kind.decompress(whole, ctx).dtype is whole.dtype is torch.int64
    packed, ctx = hvd.Compression.none.compress(x)
    assert hvd.Compression.none.decompress(packed, ctx) is x


@pytest.mark.usefixtures("job")
def test_distributed_optimizer_is_like_the_one_it_is_made_of() -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.state is inner.state
    before = model.weight.detach().clone()
    optimizer.zero_grad(set_to_none=True)
    assert model.weight.grad is None
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * 1.9)


@pytest.mark.usefixtures("job")
def test_a_rank_without_others_keeps_its_gradients_and_may_make_any_number_of_passes() -> None:
    used, idle = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([used, idle], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, compression=hvd.Compression.fp16, op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        (used * 0.1).sum().backward()
        (used * 0.1).sum().backward()
        optimizer.zero_grad()
        (used * 0.1).sum().backward()
        optimizer.step()
        assert used.grad is not None
        assert used.grad.item() == pytest.approx(0.1, abs=1e-7)  # that of fp16 is 0.09998
        assert idle.grad is None


@pytest.mark.usefixtures("job")
def test_a_scheduler_made_before_does_not_undo_the_wrapping() -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner)
    assert "step" not in vars(optimizer)
    inner.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.usefixtures("job")
@pytest.mark.filterwarnings("error")
def test_a_scheduler_made_before_sees_the_steps() -> None:
    inner = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    hvd.DistributedOptimizer(inner).step()
    schedule.step()  # torch warns of a schedule that goes on before its optimizer does


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    "wrong",
    [
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        {"gradient_predivide_factor": 0.0},
        {"gradient_predivide_factor": float("nan")},
        {"gradient_predivide_factor": "2"},
        {"backward_passes_per_step": 0},
        {"backward_passes_per_step": 1.5},
        {"op": 17},
        {"compression": "fp16"},
        {"groups": -1},
        {"groups": True},
        {"groups": [["weight"]]},
        {"process_set": [0]},
        {"process_set": hvd.ProcessSet([0])},
        {"optimizer": nn.Linear(1, 1)},
        {"named_parameters": [("a", torch.ones(1))]},
        {"named_parameters": nn.Linear(1, 1).parameters()},
    ],
)
def test_what_an_optimizer_cannot_be_made_of(wrong: dict[str, Any]) -> None:
    inner = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
        hvd.DistributedOptimizer(**{"optimizer": inner, **wrong})


@pytest.mark.usefixtures("job")
def test_groups_went_by_another_name() -> None:
    inner = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    with pytest.warns(DeprecationWarning, match="groups"):
        hvd.DistributedOptimizer(inner, num_groups=1)
