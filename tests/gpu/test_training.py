"""Training on one GPU: the same results as on the CPU up to rounding, and no step that waits for
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint.folder import CheckpointStore, read
from lockstep.communicator import init
from lockstep.data.device_copies import to_device
from lockstep.errors import ConfigError
from lockstep.training.callbacks import Checkpoints, Profile
from lockstep.training.callbacks.base import Callback
from lockstep.training.check_schedule import is_due
from lockstep.training.in_flight import HostCopy
from lockstep.training.step.out_of_memory import OutOfMemoryError
from lockstep.training.step.train_step import TrainStep
from lockstep.training.trainer import Trainer
from support import leaks
from support.gpu import DEVICE, ON_GPU, id_of, no_waiting, only_on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SAMPLES, BATCH = 512, 64


def images(device: str = "cpu") -> lockstep.data.ImageSet:
    return lockstep.data.synthetic(train=SAMPLES, test=8)[0].to(device)


def trainer_of(model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = lockstep.models.lenet() if model is None else model
    make = optimizer or partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    given = {"callbacks": [], **options}
    return Trainer(model, make(model.parameters()), nn.CrossEntropyLoss(), BATCH, **given)


def losses(device: str, epochs: int = 2, data: Any = None, **options: Any) -> list[float]:
    leaks.forget_communicator()
    init(device)
    trainer = trainer_of(**options)
    return [row["train_loss"] for row in trainer.fit(images() if data is None else data, epochs)]


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    """Convolutions on a GPU round to TF32 otherwise."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def on_cpu() -> list[float]:
    """The losses on the CPU."""
    return losses("cpu")


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-3),
        ({"gradient_accumulation_steps": 3}, 1e-3),
        ({"virtual_workers": 4}, 1e-3),
        ({"num_workers": 2}, 1e-3),
        ({"max_steps_in_flight": 1}, 1e-3),
        ({"replica_check": 0}, 1e-3),
        ({"precision": "bf16"}, 5e-2),
        ({"precision": "fp16"}, 5e-2),
    ],
    ids=id_of,
)
def test_losses_are_those_of_the_cpu(
    on_cpu: list[float], options: dict[str, Any], tolerance: float
) -> None:
    assert losses(DEVICE, **options) == pytest.approx(on_cpu, rel=tolerance)


def test_images_may_lie_on_the_gpu(on_cpu: list[float]) -> None:
    assert losses(DEVICE, data=images(DEVICE)) == pytest.approx(on_cpu, rel=1e-3)


@pytest.mark.parametrize(
    "compiled",
    [{}, {"compile_model": True}, {"compile_model": True, "compile_mode": "reduce-overhead"}],
    ids=id_of,
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_prepared_models(
    on_cpu: list[float], compiled: dict[str, Any], channels_last: bool
) -> None:
    leaks.forget_communicator()
    comm = init(DEVICE)
    torch.manual_seed(0)
    model = lockstep.prepare_model(
        lockstep.models.lenet(), comm, **compiled, channels_last=channels_last
    )
    found = [row["train_loss"] for row in trainer_of(model).fit(images(), 2)]
    assert found == pytest.approx(on_cpu, rel=1e-2)


def steps_of(batches: list[Any], **options: Any) -> Callable[[], None]:
    """Return a function that runs one step on the GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(lockstep.models.lenet(), nn.Dropout(0.1), nn.BatchNorm1d(10))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = TrainStep(model, adamw, nn.CrossEntropyLoss(), **options)
    numbers = iter(range(1_000_000))
    return lambda: step.run(batches[next(numbers) % len(batches)]) and None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": 1.0},
        {"gradient_accumulation_steps": 2},
        {"precision": "bf16"},
        {"virtual_workers": 4},
        {"schedule": lambda step: 1 / (1 + step)},
    ],
    ids=id_of,
)
def test_a_step_does_not_wait_for_the_gpu(options: dict[str, Any]) -> None:
    comm = init(DEVICE)
    loader = lockstep.Loader(
        images(), BATCH, comm=comm, virtual_workers=options.get("virtual_workers")
    )
    run = steps_of(list(loader.epoch(0)), **options)
    for _ in range(12):  # the first ones look at the loss function, and choose kernels
        run()
    with no_waiting():
        for _ in range(12):
            run()


def own_loop(epochs: int, count: bool = False, labels: torch.Tensor | None = None) -> Iterator[int]:
    """Train in a loop with `prepare`; yields the number of each step before it begins."""
    torch.manual_seed(0)
    model = nn.Sequential(lockstep.models.lenet(), nn.BatchNorm1d(10))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = lockstep.Loader(images(DEVICE), BATCH)
    model, optimizer, loader = lockstep.prepare(model, adamw, loader)
    step = 0
    for _ in range(epochs):
        for inputs, targets in loader:
            yield step
            targets = targets if labels is None else labels
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step(loss=loss, count=(targets >= 0).sum() if count else None)
            step += 1


@pytest.mark.parametrize("count", [False, True])
def test_a_loop_with_prepare_does_not_wait_for_the_gpu(count: bool) -> None:
    init(DEVICE)
    with no_waiting(False) as forbid:
        for step in own_loop(
            3, count
        ):  # the end of an epoch, after 8 steps, waits, and so do steps that look closer
            forbid(step > 4 and step % 8 < 7 and not is_due(step))


def test_labels_that_are_ignored_are_refused_without_a_count() -> None:
    """Their number is not known when the step is queued."""
    init(DEVICE)
    labels = torch.arange(BATCH, device=DEVICE) % 10
    labels[::3] = -100
    with pytest.raises(ConfigError, match="mean over the labels that are not ignored"):
        list(own_loop(1, labels=labels))
    assert len(list(own_loop(1, count=True, labels=labels))) == SAMPLES // BATCH


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 4}, {"virtual_workers": 4}], ids=id_of
)
def test_a_part_in_which_nothing_counts(options: dict[str, int]) -> None:
    def ignoring(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = target >= 0
        count = kept.sum()
        return nn.functional.mse_loss(output[kept], target[kept]) * count, count

    def trained(**options: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        target = torch.tensor([0.5, 1, 1, -1, -1, -1, -1, -1])[:, None]
        data = torch.utils.data.TensorDataset(torch.randn(8, 3), target)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return [
            row["train_loss"]
            for row in Trainer(model, optimizer, ignoring, 8, callbacks=[], **options).fit(data, 3)
        ]

    init(DEVICE)
    assert trained(**options) == pytest.approx(trained(), rel=1e-4)


def test_a_batch_may_have_sparse_tensors() -> None:
    def dense_too(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = torch.utils.data.default_collate(samples)
        return inputs.flatten(1).to_sparse(), labels

    class Sparse(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(inputs, self.weight.t()) + self.bias

    comm = init(DEVICE)
    loader = lockstep.Loader(images(), BATCH, comm=comm, collate_fn=dense_too)
    batches = [batch.data for batch in loader.epoch(0)]
    assert all(inputs.is_sparse and inputs.device.type == comm.device.type for inputs, _ in batches)
    layer = Sparse(28 * 28, 10).to(comm.device)
    assert all(bool(layer(inputs).isfinite().all()) for inputs, _ in batches)


def test_neither_does_the_loop(tmp_path: Path) -> None:
    """The trainer's own loop with its loader; losses are read when the device has computed them."""

    class Watching(Callback):
        def on_train_step_start(self, trainer: Any, batch: Any) -> None:
            if trainer.step.steps_done == 9 and ON_GPU:
                torch.cuda.set_sync_debug_mode("error")

        def on_train_step_end(self, trainer: Any, result: Any) -> None:
            if trainer.step.steps_done == 13 and ON_GPU:  # a row reads its loss, and the end waits
                torch.cuda.set_sync_debug_mode("default")

    init(DEVICE)
    try:
        for data in (images(), images(DEVICE)):  # 14 steps: an epoch ends with the eighth
            trainer_of(callbacks=[Watching()], replica_check=0).fit(data, max_steps=14)
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


def test_clipping_and_evaluation() -> None:
    results = []
    for device in ("cpu", DEVICE):
        leaks.forget_communicator()
        init(device)
        trainer = trainer_of(max_grad_norm=0.1)
        trainer.fit(images(), 1)
        results.append(trainer.evaluate(images()))
    assert results[1] == pytest.approx(results[0], rel=1e-2)


@pytest.mark.parametrize(
    "optimizer", [None, partial(torch.optim.AdamW, lr=1e-3)], ids=["sgd", "adamw"]
)
@pytest.mark.parametrize("there_and_back", [(DEVICE, "cpu", DEVICE), ("cpu", DEVICE, "cpu")])
def test_a_checkpoint_goes_to_the_cpu_and_back(
    tmp_path: Path, there_and_back: tuple[str, ...], optimizer: Any
) -> None:
    straight = losses(DEVICE, 3, optimizer=optimizer)
    found = []
    for number, device in enumerate(there_and_back):
        leaks.forget_communicator()
        init(device)
        trainer = trainer_of(optimizer=optimizer, run_dir=tmp_path, callbacks=[Checkpoints()])
        history = trainer.fit(images(), number + 1, resume="latest" if number else None)
        found.append(history[-1]["train_loss"])
    assert found == pytest.approx(straight, rel=2e-2)


def test_a_checkpoint_is_written_beside_the_training(tmp_path: Path) -> None:
    init(DEVICE)
    trainer = trainer_of(run_dir=tmp_path, callbacks=[Checkpoints("3steps")], async_save=True)
    trainer.fit(images(), 2)
    before = lockstep.fingerprint(trainer.model, trainer.optimizer)
    again = trainer_of(run_dir=tmp_path, callbacks=[])
    again.fit(images(), 2, resume="latest")
    assert lockstep.fingerprint(again.model, again.optimizer) == before


def test_a_state_dict_comes_back_on_the_cpu(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 3)
    path = store.save({"model": nn.Linear(2, 2).to(DEVICE).state_dict()}, step=0, epoch=0, info={})
    assert {tensor.device.type for tensor in read(path).state["model"].values()} == {"cpu"}


def test_a_fingerprint_does_not_depend_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = lockstep.fingerprint(model)
    assert lockstep.fingerprint(model.to(DEVICE)) == before


def test_numbers_arrive_in_order() -> None:
    several = [HostCopy(torch.tensor([1.0, 2.0], device=DEVICE) * number) for number in range(10)]
    assert [numbers.read() for numbers in several] == [
        [number, 2.0 * number] for number in range(10)
    ]


@only_on_gpu
def test_batches_arrive_whole_while_the_gpu_is_busy() -> None:
    device = torch.device("cuda", 0)
    busy = torch.randn(2048, 2048, device=device)
    sent = [torch.full((1 << 16,), float(number)).pin_memory() for number in range(40)]
    sums = []
    for number, (data,) in enumerate(to_device(((tensor,) for tensor in sent), device)):
        busy = busy @ busy / busy.norm()
        sums.append((data - number).abs().sum())
    assert torch.stack(sums).eq(0).all()


class Slow(nn.Linear):
    """Keeps the GPU busy, so that the host queues as many steps as it may."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        busy = torch.ones(4096, 4096, device=inputs.device)
        for _ in range(20):
            busy = busy @ busy / 4096
        return super().forward(inputs) + busy.detach()[0, 0] * 0


@only_on_gpu
@pytest.mark.parametrize("most", [1, 4])
def test_queued_steps_have_no_more_batches_on_the_gpu_than_the_bound(most: int) -> None:
    device, (samples, width), batches = init(DEVICE).device, (512, 16384), 16
    data = torch.utils.data.TensorDataset(
        torch.randn(batches * samples, width), torch.zeros(batches * samples, 1)
    )
    model = Slow(width, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(
        model, optimizer, nn.MSELoss(), samples, callbacks=[], max_steps_in_flight=most
    )
    trainer.fit(data, max_steps=4)  # what the first steps allocate
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trainer.fit(data, max_steps=4 + 12)
    batch, busy = 4 * samples * width, 4 * 4096 * 4096
    # those of the bound, one that is made and one that is copied, and the matrices of a step
    assert torch.cuda.max_memory_allocated(device) - before <= (most + 2) * batch + 4 * busy


@only_on_gpu
def test_a_profile_has_the_kernels(tmp_path: Path) -> None:
    init(DEVICE)
    trainer_of(run_dir=tmp_path, callbacks=[Profile(range(3, 6))]).fit(images(), 1)
    table = next((tmp_path / "profile").glob("*.txt")).read_text()
    assert "CUDA" in table


@only_on_gpu
def test_without_memory_the_error_says_what_to_try() -> None:
    class Large(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            torch.empty(1 << 44, dtype=torch.uint8, device=inputs.device)
            return super().forward(inputs.flatten(1))

    init(DEVICE)
    with pytest.raises(OutOfMemoryError) as caught:
        trainer_of(Large(28 * 28, 10)).fit(images(), 1)
    text = str(caught.value)
    assert text.startswith(
        f"rank 0: cuda:0 is out of memory in step 0, with {BATCH} of the {BATCH} samples"
    )
    assert "16384.00 GiB more were asked for" in text
    assert "are this process's" in text
    assert "\n" not in text
