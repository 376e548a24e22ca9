"""The compatibility layer for programs written for Gluon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import compilation
from lockstep.compat import gluon
from lockstep.compat.gluon import Context, autograd, cpu, gpu, init, nd, nn, sym
from lockstep.compat.gluon import loss as gloss
from lockstep.compat.gluon import utils as gutils
from lockstep.errors import ConfigError

CTX = [cpu(0), cpu(1)]


def make_net(ctx: Any = CTX) -> nn.HybridSequential:
    torch.manual_seed(0)
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(4, kernel_size=3),
        nn.BatchNorm(),
        nn.Activation("relu"),
        nn.GlobalAvgPool2D(),
        nn.Dense(3),
    )
    net.initialize(init=init.Normal(sigma=0.1), ctx=ctx)
    return net


def images(samples: int = 4) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(samples, 1, 8, 8)


def losses(net: Any, x: torch.Tensor, y: torch.Tensor, ctx: Any = CTX) -> list[torch.Tensor]:
    parts = (
        gutils.split_and_load(x, ctx, even_split=False),
        gutils.split_and_load(y, ctx, even_split=False),
    )
    with autograd.record():
        return [gloss.SoftmaxCrossEntropyLoss()(net(a), b) for a, b in zip(*parts, strict=True)]


def test_batches_are_split_and_loaded() -> None:
    first, second = gutils.split_and_load(nd.arange(24).reshape(6, 4), CTX)
    assert (first.shape, second.shape) == ((3, 4), (3, 4))
    assert (first.context, second.context) == (cpu(0), cpu(1))
    with pytest.raises(ConfigError, match="2 devices share evenly, got 5"):
        gutils.split_and_load(torch.zeros(5), CTX)
    uneven = gutils.split_and_load(torch.zeros(5), ["cpu", "cpu"], even_split=False)
    assert [len(part) for part in uneven] == [3, 2]
    assert [str(part.context) for part in uneven] == ["cpu(0)", "cpu(1)"]


def test_a_net_computes_where_its_input_is() -> None:
    net = make_net()
    x = gutils.split_and_load(images(), CTX)
    assert net(x[0]).shape == (2, 3)
    weight = net[0].params.get("weight")
    assert weight.shape == (4, 1, 3, 3)
    assert torch.equal(weight.data(CTX[0]), weight.data(CTX[1]))
    with torch.no_grad():
        weight.data(cpu(1)).zero_()
        net[-1].params.get("bias").data(cpu(1)).fill_(5)
    assert not net(x[0]).eq(5).any()
    assert net(x[1]).context == cpu(1)
    assert weight.list_ctx() == CTX


def test_parameters_have_a_context() -> None:
    net = nn.Dense(2)
    with pytest.raises(RuntimeError, match="to be initialised"):
        net(images())
    net.initialize(ctx=[cpu(1), cpu(2)])
    weight = net.params.get("weight")
    with pytest.raises(RuntimeError, match="Call the model once"):
        weight.data(cpu(1))
    net(nd.ones((2, 3), ctx=cpu(1)))
    with pytest.raises(
        RuntimeError,
        match=r"weight was initialised on, one of \[cpu\(1\), cpu\(2\)\], got cpu\(0\)",
    ):
        weight.data()
    with pytest.raises(RuntimeError, match=r"got cpu\(3\)"):
        net(nd.ones((2, 3), ctx=cpu(3)))
    if not torch.accelerator.is_available():
        with pytest.raises(ConfigError, match="There is no accelerator"):
            net.initialize(ctx=gpu(0), force_reinit=True)
            net(torch.ones(2, 3))


def test_initialising_again_must_be_requested() -> None:
    net = make_net()
    net(images())
    before = net[0].params.get("weight").data(cpu(0)).clone()
    with pytest.warns(UserWarning, match=r"already initialised on \[cpu\(0\), cpu\(1\)\]"):
        net.initialize(ctx=cpu(5))
    assert torch.equal(net[0].params.get("weight").data(cpu(0)), before)
    net.initialize(ctx=cpu(5), force_reinit=True)
    weight = net[0].params.get("weight")
    assert weight.list_ctx() == [cpu(5)]
    assert not torch.equal(weight.data(), before)
    assert net[0].params.get("bias").data().eq(0).all()


@pytest.mark.parametrize("ctx", [[cpu(0)], CTX, [cpu(0), cpu(1), cpu(2)]], ids=len)
def test_a_step_is_that_of_the_whole_batch(ctx: list[Context]) -> None:
    x, y = images(7), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    net = nn.Sequential()
    torch.manual_seed(3)
    net.add(nn.Dense(4, activation="tanh", in_units=64), nn.Dense(3, in_units=4))
    net.initialize(init=init.Xavier(), ctx=ctx)
    plain = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)
    )
    with torch.no_grad():
        for own, parameter in zip(plain.parameters(), net.collect_params().values(), strict=True):
            own.copy_(parameter.data(ctx[0]))
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.5, "momentum": 0.9, "wd": 0.01}
    )
    optimizer = torch.optim.SGD(plain.parameters(), 0.5, momentum=0.9, weight_decay=0.01)
    for _ in range(2):
        for loss in losses(net, x, y, ctx):
            loss.backward()
        trainer.step(len(x))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for own, parameter in zip(plain.parameters(), net.collect_params().values(), strict=True):
        torch.testing.assert_close(parameter.data(ctx[-1]).detach(), own.detach())
        assert all(torch.equal(parameter.data(ctx[0]), other) for other in parameter.list_data())


def test_losses_on_one_device_add_to_one_gradient() -> None:
    """As those of several heads of a model do; MXNet computes all heads in one pass."""
    x, y = images(8), torch.arange(8) % 3
    steps = []
    for ctx in ([cpu(0)], [cpu(0), cpu(0)]):
        net = nn.Dense(3, in_units=64)
        torch.manual_seed(3)
        net.initialize(init=init.Xavier(), ctx=ctx)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
        for _ in range(2):
            autograd.backward(losses(net, x, y, ctx))
            trainer.step(len(x))
        steps.append(net.params.get("weight").data(cpu(0)).detach())
    torch.testing.assert_close(steps[1], steps[0])


def test_a_gradient_of_an_earlier_step_is_not_taken_for_a_new_one() -> None:
    net, y = make_net(), torch.tensor([0, 1, 2, 0])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for loss in losses(net, images(), y):
        loss.backward()
    trainer.step(4)
    weight = net[0].params.get("weight")
    assert weight.grad(cpu(1)).abs().sum() > 0
    before = weight.data(cpu(1)).clone()
    losses(net, images(), y)[0].backward()
    with pytest.raises(ConfigError, match=r"none of 0\.layer\.weight on cpu\(1\), and 5 more"):
        trainer.step(4)
    assert torch.equal(weight.data(cpu(1)), before)
    trainer.step(4, ignore_stale_grad=True)
    assert torch.equal(weight.data(cpu(1)), weight.data(cpu(0)))
    assert not torch.equal(weight.data(cpu(1)), before)


def test_a_trainer_continues_after_initialising_again() -> None:
    net, y = make_net(), torch.tensor([0, 1, 2, 0])
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1, "beta1": 0.5})
    for ctx in (CTX, [cpu(4)]):
        net.initialize(ctx=ctx, force_reinit=True)
        for loss in losses(net, images(), y, ctx):
            loss.backward()
        before = [p.data(ctx[0]).clone() for p in net.collect_params().values()]
        trainer.set_learning_rate(0.2)
        trainer.step(4)
        after = [p.data(ctx[0]) for p in net.collect_params().values()]
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True) if b.dim() > 1)
    assert trainer.learning_rate == 0.2


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sdg", {}, "adadelta, adagrad"),
        ("sgd", {"learning_rat": 1}, "options of sgd"),
        ("sgd", {"lr": -1}, "-1"),
    ],
)
def test_optimizers_that_cannot_be_used(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gluon.Trainer([], name, options)


def test_training_and_graphs_are_those_of_record() -> None:
    net = nn.Sequential()
    net.add(nn.Dropout(0.5), nn.BatchNorm())
    net.initialize(ctx=CTX)
    x = images(64)
    plain = net(x)
    assert not plain.requires_grad
    torch.testing.assert_close(torch.as_tensor(plain), x / (1 + 1e-5) ** 0.5)
    assert torch.equal(net(x), plain)
    with autograd.record():
        assert autograd.is_training()
        assert net(x).requires_grad
        assert not torch.equal(net(x), net(x))
        with autograd.pause():
            assert not net(x).requires_grad
    with autograd.record(train_mode=False):
        torch.testing.assert_close(net(x).detach().mean(), plain.mean(), atol=0.5, rtol=0)
    assert not autograd.is_recording()


def test_losses_are_of_samples_and_their_backward_is_of_the_sum() -> None:
    prediction = nd.array([[1.0, 2.0], [3.0, 4.0]])
    prediction.attach_grad()
    with pytest.raises(
        ConfigError, match=r"computed within autograd\.record\(\), got one that was not"
    ):
        gloss.L2Loss()(prediction, nd.zeros((2, 2))).backward()
    with autograd.record():
        loss = gloss.L2Loss()(prediction, nd.zeros((2, 2)))
    assert loss.tolist() == [1.25, 6.25]
    loss.backward()
    assert prediction.grad is not None
    assert prediction.grad.tolist() == [[0.5, 1.0], [1.5, 2.0]]
    assert loss.mean().asscalar() == 3.75
    assert gloss.L1Loss()(prediction, nd.zeros((2, 2))).tolist() == [1.5, 3.5]


def test_arrays_by_hand() -> None:
    arrays = [nd.ones((1, 2), ctx=context) * (number + 1) for number, context in enumerate(CTX)]
    arrays[0][:] += arrays[1].copyto(arrays[0].context)
    arrays[0].copyto(arrays[1])
    nd.waitall()
    assert [array.asnumpy().tolist() for array in arrays] == [[[3, 3]], [[3, 3]]]
    arrays[0].fill_(0)
    assert arrays[1].as_in_context(cpu(2)).context == cpu(2)
    assert nd.random.normal(scale=0.01, shape=(20, 1, 3, 3)).shape == (20, 1, 3, 3)
    assert nd.dot(nd.ones((2, 3)), nd.ones((3, 1))).norm().asscalar() > 0


class Net(nn.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Dense(10), nn.Dense(2)

    def hybrid_forward(self, F: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return self.output(F.relu(self.hidden(x)))  # type: ignore[no-any-return]


def test_hybridized_nets_give_the_same_and_can_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "_ONNX", ("no_such_package",))
    torch.compiler.reset()
    net = Net()
    net.initialize()
    x = nd.random.normal(shape=(3, 4))
    with pytest.raises(RuntimeError, match="Call the model once"):
        net.export(str(tmp_path / "net"))
    expected = net(x)
    net.hybridize(static_alloc=True, backend="eager")
    torch.testing.assert_close(net(x), expected)
    net(x[:1])  # one sample, from which the program must not learn that there is always one
    net.export(str(tmp_path / "net"))
    net.hybridize(active=False)
    torch.testing.assert_close(net(x), expected)
    program = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(
        program(torch.as_tensor(x).as_subclass(torch.Tensor)), torch.Tensor(expected)
    )


def test_a_symbol_gives_the_program() -> None:
    net = Net()
    net.initialize()
    x = nd.random.normal(shape=(1, 4))
    with pytest.raises(RuntimeError, match="Call the model once"):
        net(sym.var("data"))
    expected = net(x)
    symbol = net(sym.var("data"))
    assert repr(symbol) == "<Symbol net_fwd>"
    pair = torch.cat([torch.Tensor(x)] * 2)
    torch.testing.assert_close(
        symbol.program.module()(pair), torch.cat([torch.Tensor(expected)] * 2)
    )


def lenet(x: Any, parameters: list[Any]) -> Any:
    w1, b1, w2, b2 = parameters
    hidden = nd.relu(nd.Convolution(data=x, weight=w1, bias=b1, kernel=(3, 3), num_filter=4))
    hidden = nd.flatten(nd.Pooling(data=hidden, pool_type="avg", kernel=(2, 2), stride=(2, 2)))
    return nd.dot(hidden, w2) + b2


def test_training_by_hand_on_two_devices() -> None:
    """As the tutorials do it: gradients of earlier batches are replaced, and updates are not
    recorded.
    """
    torch.manual_seed(0)
    shapes = [(4, 1, 3, 3), (4,), (36, 3), (3,)]
    first = [nd.random.normal(scale=0.1, shape=shape) for shape in shapes]
    plain = [torch.Tensor(p).clone().requires_grad_() for p in first]
    copies = [[p.copyto(context) for p in first] for context in CTX]
    for copy in copies:
        for parameter in copy:
            parameter.attach_grad()
    x, y = images(6), torch.tensor([0, 1, 2, 0, 1, 2])
    for _ in range(2):
        parts = zip(
            gutils.split_and_load(x, CTX), gutils.split_and_load(y, CTX), copies, strict=True
        )
        with autograd.record():
            autograd.backward(
                [gloss.SoftmaxCrossEntropyLoss()(lenet(a, copy), b) for a, b, copy in parts]
            )
        for one, other in zip(*copies, strict=True):
            one.grad[:] += other.grad.copyto(one.context)
            one.grad.copyto(other.grad)
        for copy in copies:
            for parameter in copy:
                parameter[:] = parameter - 0.5 * parameter.grad / len(x)
        hidden = torch.nn.functional.conv2d(x, plain[0], plain[1]).relu()
        hidden = torch.nn.functional.avg_pool2d(hidden, 2).flatten(1)
        loss = torch.nn.functional.cross_entropy(hidden @ plain[2] + plain[3], y)
        with torch.no_grad():
            for parameter, gradient in zip(plain, torch.autograd.grad(loss, plain), strict=True):
                parameter -= 0.5 * gradient
    for parameter, *own in zip(plain, *copies, strict=True):
        torch.testing.assert_close(torch.Tensor(own[0]).detach(), parameter.detach())
        assert torch.equal(own[0], own[1])


def test_what_is_computed_is_where_it_was_computed_from() -> None:
    array = nd.ones((2, 3), ctx=cpu(1))
    assert {
        (array * 2 + 1).context,
        array[:1].context,
        array.sum().context,
        nd.relu(array).context,
    } == {cpu(1)}
    array.attach_grad()
    assert array.grad.context == cpu(1)
    assert nd.dot(array, array.reshape(3, 2)).context == cpu(1)
    net = nn.Dense(1, in_units=3)
    net.initialize(ctx=CTX)
    net.params.get("bias").data(cpu(1))[:] = 7
    assert torch.equal(net(array * 0), torch.full((2, 1), 7.0))


def test_each_backward_replaces_the_gradient_unless_it_is_to_be_added() -> None:
    net = nn.Dense(1, in_units=2, use_bias=False)
    net.initialize()
    weight, x = net.params.get("weight"), nd.ones((3, 2))
    found = []
    for how in ("write", "add", "write"):
        weight.grad_req = how
        with autograd.record():
            net(x).backward()
        found.append(weight.grad().tolist())
    assert found == [[[3, 3]], [[6, 6]], [[3, 3]]]
    weight.grad_req = "null"
    weight.zero_grad()
    with autograd.record():
        assert not net(x).requires_grad
    with pytest.raises(ConfigError, match="write, add or null, got 'rite'"):
        weight.grad_req = "rite"
    lazily = nn.Dense(1)
    lazily.params.get("weight").grad_req = "add"
    lazily.initialize()
    for _ in range(2):
        with autograd.record():
            lazily(x).backward()
    assert lazily.params.get("weight").grad().tolist() == [[6, 6]]


def test_arrays_have_sizes_and_types_as_in_mxnet() -> None:
    array = nd.array([[1, 2, 3], [4, 5, 6]])
    assert array.size + 0 == 6
    assert (array.size(), array.size(1)) == ((2, 3), 3)
    assert array.astype("int32").dtype == torch.int32
    assert array.astype(torch.float64).context == cpu()
    right = (array.argmax(axis=1) == nd.array([2, 0]).astype("float32")).sum()
    assert right.copyto(cpu()).asscalar() == 1
    with pytest.raises(ConfigError, match="max or avg, got 'sum'"):
        nd.Pooling(array, kernel=2, pool_type="sum")


def test_layers_have_their_parameters_and_arrays_have_a_context() -> None:
    net = nn.Sequential()
    net.add(nn.Conv2D(2, 3), nn.Dense(2, use_bias=False))
    net.initialize(ctx=CTX)
    net(nd.ones((1, 1, 4, 4)))
    assert net[0].weight.data(cpu(1)).shape == (2, 1, 3, 3)
    assert net[0].bias.grad(cpu(1)).tolist() == [0, 0]
    net[1].weight.set_data(nd.zeros((2, 8)))
    assert net.collect_params()["1.layer.weight"].data(cpu(1)).eq(0).all()
    with pytest.raises(AttributeError, match="bias"):
        _ = net[1].bias
    assert repr(nd.ones((1, 2), ctx=cpu(1))) == "NDArray([[1., 1.]]) @cpu(1)"


@pytest.mark.parametrize("size", [0, -1])
def test_a_step_needs_samples(size: int) -> None:
    net = nn.Dense(1, in_units=1)
    net.initialize(ctx=cpu())
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        loss = net(nd.ones((1, 1)))
    loss.backward()
    with pytest.raises(ConfigError, match="batch_size: expected at least one sample"):
        trainer.step(size)
