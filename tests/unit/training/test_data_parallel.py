"""A model on several devices of one process computes what it computes alone."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import DataParallel
from lockstep.errors import ConfigError
from lockstep.parallel.replicas import copies
from lockstep.parallel.replicas.copies import copy_module
from lockstep.replicas import ReplicaError

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def data(samples: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randn(samples, 6), torch.randint(4, (samples,))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


LOSSES = [
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), ignore_index=2),
    nn.CrossEntropyLoss(reduction="none"),
    lambda output, target: (output.square().sum() + target.sum(), output.numel()),
]


def as_mean(loss: Any) -> torch.Tensor:
    value: torch.Tensor = loss[0] / loss[1] if isinstance(loss, tuple) else loss.mean()
    return value


@pytest.mark.parametrize("loss_fn", LOSSES, ids=["mean", "weighted", "per-sample", "counted"])
@pytest.mark.parametrize("devices", [["cpu"], TWO, THREE], ids=len)
def test_loss_and_gradient_are_those_of_the_whole_batch(loss_fn: Any, devices: list[str]) -> None:
    images, labels = data()
    alone, model = make_model(), make_model()
    expected = as_mean(loss_fn(alone(images), labels))
    expected.backward()
    loss = DataParallel(model, devices, loss=loss_fn)(images, target=labels)
    loss.backward()
    assert loss.dim() == 0
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model), gradients(alone))


def test_outputs_come_back_in_order_with_their_graph() -> None:
    images, labels = data()
    alone, model = make_model(), make_model()
    nn.functional.cross_entropy(alone(images), labels).backward()
    output = DataParallel(model, THREE)(images)
    nn.functional.cross_entropy(output, labels).backward()
    torch.testing.assert_close(output, alone(images))
    torch.testing.assert_close(gradients(model), gradients(alone))


class Twice(nn.Module):
    """Two outputs of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_model()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, y.exp()


@pytest.mark.parametrize("samples", [17, 1])
def test_outputs_may_be_changed_in_place(samples: int) -> None:
    images, _ = data(samples)
    alone, model = Twice(), Twice()
    for net in (alone, DataParallel(model, TWO)):
        first, second = net(images)
        first.mul_(2)
        (first + second).sum().backward()
    torch.testing.assert_close(gradients(model), gradients(alone))


def test_steps_repeat_to_the_bit_in_threads_and_without() -> None:
    def run(threads: bool) -> list[torch.Tensor]:
        model = make_model()
        parallel = DataParallel(model, THREE, loss=nn.CrossEntropyLoss())
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        images, labels = data()
        for _ in range(3):
            optimizer.zero_grad()
            loss = parallel(images, target=labels)
            if not threads:
                joined = loss.grad_fn.next_functions[0][0]
                joined.forward_pass.threads = None  # as where autograd has threads of its own
            loss.backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    first = run(True)
    assert all(torch.equal(a, b) for a, b in zip(first, run(True), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, run(False), strict=True))


class Meeting(torch.autograd.Function):
    """Waits in both directions until two are there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, barrier: threading.Barrier) -> torch.Tensor:
        ctx.barrier = barrier
        barrier.wait(60)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.barrier.wait(60)
        return gradient * 2, None


def test_forward_and_backward_run_on_all_at_the_same_time() -> None:
    barrier = threading.Barrier(2)  # broken where they run one after the other

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Meeting.apply(super().forward(x), barrier)
            return found

    model = Model(2, 2)
    DataParallel(model, TWO)(torch.ones(4, 2)).sum().backward()
    assert model.bias.grad.tolist() == [8, 8]


def test_replicas_stay_and_see_every_change_of_the_model() -> None:
    model = make_model()
    parallel = DataParallel(model, TWO)
    images, _ = data(4)
    parallel(images)
    replicas = parallel._engine._replicas._copies
    with torch.no_grad():
        model[2].bias.add_(1)
    model[0].weight.data.mul_(2)  # behind autograd's back
    torch.testing.assert_close(parallel(images), model(images))
    assert parallel._engine._replicas._copies is replicas
    model[1] = nn.ReLU()
    torch.testing.assert_close(parallel(images), model(images))
    model.double()
    assert parallel(images.double()).dtype == torch.float64
    parallel.module = make_model()
    torch.testing.assert_close(parallel(images), parallel.module(images))


def test_replicas_in_other_memory_follow_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # as on another device than the model's
    monkeypatch.setattr(
        copies, "copy_module", lambda module, device, shared: copy_module(module, device)
    )
    model = make_model()
    parallel = DataParallel(model, TWO)
    images, labels = data(4)
    first = nn.functional.cross_entropy(parallel(images), labels)
    model[0].weight.data.mul_(2)
    second = nn.functional.cross_entropy(
        parallel(images), labels
    )  # no in-place change that the first would mind
    (first + second).backward()
    torch.testing.assert_close(parallel(images), model(images))
    loss = parallel(images).sum()
    with torch.no_grad():
        model[2].weight.add_(1)
    parallel(images)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Settings:
    scale = 1.0


class Attributes(nn.Module):
    """Computes with attributes that are no parameters, buffers, layers or plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.mask, self.function, self.powers, self.settings = (
            torch.ones(2),
            torch.relu,
            [1],
            Settings(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (
            self.function(x * self.weight * self.mask) ** self.powers[0] * self.settings.scale
        )
        return found


def change_function(model: Any) -> None:
    model.function = torch.sin


def change_mask(model: Any) -> None:
    model.mask = torch.zeros(2)


def change_mask_in_place(model: Any) -> None:
    model.mask.mul_(2)


def change_powers(model: Any) -> None:
    model.powers[0] = 2


def change_settings(model: Any) -> None:
    model.settings.scale = 3.0


def change_forward(model: Any) -> None:
    model.forward = torch.neg


@pytest.mark.parametrize(
    "change",
    [
        change_function,
        change_mask,
        change_mask_in_place,
        change_powers,
        change_settings,
        change_forward,
    ],
    ids=lambda change: change.__name__,
)
def test_other_attributes_are_followed(change: Any) -> None:
    model = Attributes()
    parallel = DataParallel(model, TWO)
    images = torch.rand(3, 2) + 0.1
    parallel(images)
    replicas = parallel._engine._replicas._copies
    parallel(images)
    assert parallel._engine._replicas._copies is replicas
    before = model(images)
    change(model)
    assert not model(images).equal(before)
    torch.testing.assert_close(parallel(images), model(images))


class Odd(nn.Module):
    """With a parameter that is not used, one that is frozen, and outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.share = 1.0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, extra: Any = None) -> dict[str, Any]:
        y = x * self.used * self.frozen * scale * self.share
        return {"y": y, "count": torch.tensor(len(x)), "mean": y.mean(), "extra": extra}


def test_unused_and_frozen_parameters_and_nested_outputs() -> None:
    model = Odd()
    found = DataParallel(model, TWO)(torch.ones(3, 2), scale=2.0, extra="text")
    assert found["y"].shape == (3, 2)
    assert found["count"].tolist() == [2, 1]
    assert found["mean"].shape == (2,)
    assert found["extra"] == "text"
    found["y"].sum().backward()
    assert model.used.grad is not None
    assert model.used.grad.tolist() == [6, 6]
    assert model.unused.grad is None
    assert model.frozen.grad is None


def test_what_is_set_in_the_model_holds_in_the_replicas() -> None:
    model = Odd()
    parallel = DataParallel(model, TWO)
    parallel(torch.ones(3, 2))
    model.share = 3.0
    model.used.requires_grad_(False)
    model.frozen.requires_grad_(True)
    found = parallel(torch.ones(3, 2))
    found["y"].sum().backward()
    assert found["y"].eq(3).all()
    assert model.used.grad is None
    assert model.frozen.grad is not None


def test_gradients_reach_the_inputs() -> None:
    model = make_model()
    images, _ = data(5)
    inputs = (images * 1).requires_grad_()
    scale = torch.tensor(2.0, requires_grad=True)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * by

    (DataParallel(Scaled(), THREE)(inputs * 3, scale).square()).sum().backward()
    found = inputs.grad, scale.grad
    inputs.grad = scale.grad = None
    (model(inputs * 3) * scale).square().sum().backward()
    torch.testing.assert_close(found, (inputs.grad, scale.grad))


def test_several_passes_before_one_backward() -> None:
    images, labels = data(8)
    alone, model = make_model(), make_model()
    parallel = DataParallel(model, TWO, loss=nn.CrossEntropyLoss())
    (
        parallel(images[:5], target=labels[:5]) * 5 + parallel(images[5:], target=labels[5:]) * 3
    ).backward()
    nn.functional.cross_entropy(alone(images), labels, reduction="sum").backward()
    torch.testing.assert_close(gradients(model), gradients(alone))


def test_a_graph_that_is_kept_can_be_used_again() -> None:
    model = make_model()
    images, _ = data(4)
    loss = DataParallel(model, TWO)(images).sum()
    loss.backward(retain_graph=True)
    first = [gradient.clone() for gradient in gradients(model) if gradient is not None]
    loss.backward()
    torch.testing.assert_close(gradients(model), [2 * gradient for gradient in first])
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


def test_hooks_of_a_parameter_see_the_whole_gradient() -> None:
    model = make_model()
    images, _ = data(4)
    seen: list[torch.Tensor] = []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    DataParallel(model, TWO)(images).sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], model[0].weight.grad)


def test_tied_weights_recurrent_layers_and_sparse_gradients() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4, sparse=True)
            self.rnn = nn.GRU(4, 4, batch_first=True)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(self.rnn(self.embedding(words))[0]))

    torch.manual_seed(0)
    model = Words()
    alone = copy.deepcopy(model)
    words = torch.randint(9, (5, 3))
    DataParallel(model, TWO)(words).square().sum().backward()
    alone(words).square().sum().backward()
    found = [g.to_dense() for g in gradients(model) if g is not None]
    torch.testing.assert_close(found, [g.to_dense() for g in gradients(alone) if g is not None])
    assert len(found) == len(list(alone.parameters()))


# --- buffers and randomness
# -------------------------------------------------------------------------------------


def test_running_statistics_are_the_average_by_samples() -> None:
    model = nn.BatchNorm1d(2)
    parts = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    x = torch.randn(7, 2)
    parallel = DataParallel(model, TWO)
    for _ in range(2):
        parallel(x)
        parts[0](x[:4])
        parts[1](x[4:])
        for name in ("running_mean", "running_var"):
            first, second = (getattr(part, name) for part in parts)
            average = first * 4 / 7 + second * 3 / 7
            torch.testing.assert_close(getattr(model, name), average)
            first.copy_(average)
            second.copy_(average)
    assert model.num_batches_tracked == 2
    before = copy.deepcopy(model.state_dict())
    parallel.eval()
    parallel(x)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(parallel(x), model(x))


def test_other_buffers_are_those_of_the_first_replica() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1, 1))
            self.register_buffer("nothing", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(len(x))
            return x

    model = Counting()
    parallel = DataParallel(model, TWO)
    parallel(torch.zeros(5, 1))
    parallel(torch.zeros(5, 1))
    assert model.seen.item() == 6


class Noisy(nn.Module):
    """With dropout as a layer, as a function, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.dropout(x * self.weight)
        return y, nn.functional.dropout(x, 0.5, self.training), torch.rand(len(x), 64)


def test_random_functions_differ_between_replicas_and_repeat() -> None:
    parallel = DataParallel(Noisy(), TWO)
    x = torch.ones(2, 64)

    def draw(seed: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        found: tuple[torch.Tensor, ...] = parallel(x)
        return found

    first, again, other = draw(3), draw(3), draw(4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not any(torch.equal(a[0], a[1]) for a in first)
    assert not torch.equal(first[0].ne(0), first[1].ne(0))
    assert not torch.equal(parallel(x)[0], parallel(x)[0])
    first[0].sum().backward()
    torch.testing.assert_close(parallel.module.weight.grad, first[0].sum(0))


def test_the_generator_continues_as_if_the_replicas_had_drawn_once() -> None:
    parallel = DataParallel(Noisy(), TWO)
    torch.manual_seed(0)
    torch.randint(2**62, ())
    expected = torch.rand(1)
    torch.manual_seed(0)
    parallel(torch.ones(2, 64))
    assert torch.equal(torch.rand(1), expected)
    model, (images, _) = make_model(), data(4)
    before = torch.get_rng_state()
    DataParallel(model, TWO)(images)
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpointed_dropout_is_refused_and_other_layers_are_not() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(3, 3), nn.Dropout(share)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = (
                nn.Sequential(self.layer, nn.Tanh(), self.dropout) if self.dropout.p else self.layer
            )
            found: torch.Tensor = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
            return found

    x = torch.ones(4, 3)
    model = Checkpointed(0.0)
    DataParallel(model, TWO)(x).sum().backward()
    assert model.layer.bias.grad.tolist() == [4, 4, 4]
    with pytest.raises(Exception, match="drawn again in a backward pass"):
        DataParallel(Checkpointed(0.5), TWO)(x).sum().backward()


# --- what may go wrong, and other manners
# -----------------------------------------------------------------------


def test_fewer_samples_than_devices() -> None:
    images, labels = data(2)
    alone, model = make_model(), make_model()
    parallel = DataParallel(model, THREE, loss=nn.CrossEntropyLoss())
    parallel(images, target=labels).backward()
    nn.functional.cross_entropy(alone(images), labels).backward()
    torch.testing.assert_close(gradients(model), gradients(alone))
    assert parallel(images[:0]).shape == (0, 4)
    calls: list[object] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    parallel(images)
    assert len(calls) == 2


def test_samples_in_one_tensor_alone() -> None:
    parallel = DataParallel(Odd(), TWO)
    with pytest.raises(ConfigError, match="samples for replica 1 in every tensor"):
        parallel(torch.ones(3, 2), extra=torch.ones(1))


def test_a_failure_names_device_and_shapes() -> None:
    with pytest.raises(
        ReplicaError, match=r"replica 0 of 2 on cpu, given \[2, 5\] float32: RuntimeError"
    ):
        DataParallel(make_model(), TWO)(torch.zeros(3, 5))


def test_without_gradients_there_is_no_graph() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), make_model())
    parallel = DataParallel(model, TWO)
    images, _ = data(4)
    with torch.inference_mode():
        parallel(images)
    with torch.no_grad():
        assert not parallel(images).requires_grad
    parallel(images).sum().backward()
    assert model[0].weight.grad is not None


def test_old_scripts() -> None:
    model = make_model()
    parallel = DataParallel(model, TWO, "cpu", 0)
    assert parallel.module is model
    assert parallel.output_device == torch.device("cpu")
    assert parallel.device_ids == [torch.device("cpu")] * 2
    assert DataParallel(model, device_ids=TWO).devices == parallel.devices
    with pytest.raises(ConfigError, match="device_ids: expected"):
        DataParallel(model, TWO, device_ids=TWO)
    if not torch.accelerator.is_available():
        assert DataParallel(model).devices == [torch.device("cpu")]
    wide = nn.Identity()
    assert DataParallel(wide, TWO, dim=1)(torch.zeros(1, 5)).shape == (1, 5)


def test_the_state_has_the_models_names_and_takes_both() -> None:
    model = make_model()
    parallel = DataParallel(model, TWO)
    state = parallel.state_dict()
    assert list(state) == list(model.state_dict())
    other = DataParallel(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), TWO)
    other.load_state_dict(state)
    torch.testing.assert_close(other.state_dict(), state)
    torch_names = {f"module.{name}": value + 1 for name, value in state.items()}
    other.load_state_dict(torch_names)
    torch.testing.assert_close(other.module[0].bias, model[0].bias + 1)
    outer, another = nn.Sequential(parallel), nn.Sequential(other)
    assert "0.0.weight" in outer.state_dict()
    another.load_state_dict(outer.state_dict())
    torch.testing.assert_close(other.module[0].bias, model[0].bias)
    with pytest.raises(RuntimeError, match="more"):
        other.load_state_dict({**state, "more": torch.ones(1)})


def test_the_state_is_brought_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: f"{list(tensor.shape)} on the CPU")
    parallel = DataParallel(model, TWO)
    assert parallel.state_dict()["0.bias"] == "[5] on the CPU"
    assert parallel.state_dict(keep_vars=True)["0.bias"] is model[0].bias
    outer = nn.Sequential(nn.Linear(1, 1), parallel).state_dict()
    assert [name for name, value in outer.items() if isinstance(value, torch.Tensor)] == [
        "0.weight",
        "0.bias",
    ]


def test_it_can_be_copied_and_saved_whole() -> None:
    parallel = DataParallel(make_model(), TWO)
    images, _ = data(4)
    expected = parallel(images)
    for other in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        torch.testing.assert_close(other(images), expected)
        with torch.no_grad():
            other.module[0].weight.zero_()
        torch.testing.assert_close(other(images), other.module(images))
        torch.testing.assert_close(parallel(images), expected)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_a_loss_that_is_no_mean_over_samples_is_refused_at_the_first_batch(
    devices: list[str],
) -> None:
    def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output @ target.T, torch.arange(len(output)))

    torch.manual_seed(0)
    refused = DataParallel(nn.Linear(3, 4), devices, loss=contrastive)
    with pytest.raises(ConfigError, match=r"loss_fn: .* contrastive, which gives"):
        refused(torch.randn(8, 3), target=torch.randn(8, 4))
    fine = DataParallel(
        nn.Linear(3, 4), devices, loss=lambda output, target: (output - target).square().mean()
    )
    assert fine(torch.randn(8, 3), target=torch.randn(8, 4)).isfinite()


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_a_loss_is_refused_at_a_later_batch_that_shows_it(devices: list[str]) -> None:
    net = DataParallel(
        nn.Linear(3, 4),
        devices,
        loss=lambda output, target: nn.functional.cross_entropy(output, target),
    )
    inputs, labels = (
        torch.randn(8, 3, generator=torch.Generator().manual_seed(0)),
        torch.arange(8) % 4,
    )
    for _ in range(4):
        net(inputs, target=labels)
    labels[0] = -100
    with pytest.raises(ConfigError, match="loss_fn: expected a mean over samples"):
        net(inputs, target=labels)
