"""`lockstep.ray.launch` on real local clusters, and `lockstep.init` in Ray Train and in actors.

All tests share one cluster, which takes seconds to start. `make test-cluster` installs Ray and runs
them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install 'lockstep-train[ray]', or make test-cluster"
)

from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.placement_group import placement_group_table  # noqa: E402

import lockstep.ray  # noqa: E402

pytestmark = [
    pytest.mark.leaks(
        "the driver's connection to Ray, and the cluster, serve all tests of this file"
    ),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.timeout(240),
]

MEMORY = 100 << 20
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node with four CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        source = str(Path(lockstep.__file__).parents[1])
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
        )
        patch.setenv("OMP_NUM_THREADS", "1")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        head = {"num_cpus": 4, "object_store_memory": MEMORY, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            for number, handler in handlers.items():
                signal.signal(number, handler)


def add_node(cluster: Any, name: str, cpus: int = 2) -> Any:
    """A node that only workers with the resource `name` are placed on."""
    return cluster.add_node(num_cpus=cpus, resources={name: cpus}, object_store_memory=MEMORY)


def wait_for(is_there: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_there():
        assert time.monotonic() < deadline, f"no {what} within {LIMIT_S:g} s"
        time.sleep(0.02)


def living_actors() -> list[dict[str, Any]]:
    return [each for each in ray._private.state.actors().values() if each["State"] != "DEAD"]


def assert_nothing_left() -> None:
    """No actor and no placement group is left, and what they had reserved is free again."""
    wait_for(
        lambda: {each["state"] for each in placement_group_table().values()} <= {"REMOVED"},
        "removed groups",
    )

    wait_for(lambda: not living_actors(), "end of all actors")


def test_ranks_of_a_node_are_processes_of_one_actor_and_share_memory(
    cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(factor: int, *, power: int) -> tuple[Any, ...]:
        import torch.distributed as dist

        comm = lockstep.init()
        total = comm.allreduce(torch.tensor([float(factor * (comm.rank + 1) ** power)]))
        print("on standard output")
        print("on standard error", file=sys.stderr)
        processes = comm.allgather_object((os.getpid(), os.getppid()))
        return (
            total,
            processes,
            type(dist.group.WORLD).__name__,
            comm.world,
            torch.get_num_threads(),
            os.getpid(),
        )

    total, processes, group, world, threads, pid = lockstep.ray.launch(body, 10, workers=3, power=2)
    assert total.tolist() == [140.0]
    workers, parents = (set(each) for each in zip(*processes, strict=True))
    assert (len(workers), len(parents)) == (3, 1)
    assert os.getpid() != pid
    assert group == "ShmGroup"
    assert (world.world_size, world.local_world_size, world.nodes, threads) == (3, 3, 1, 1)
    shown = capfd.readouterr()
    for rank in range(3):
        assert f"[{rank}] on standard output\n" in shown.out
        assert f"[{rank}] on standard error\n" in shown.err
    assert_nothing_left()


def test_the_error_of_a_rank_is_raised_with_its_rank_and_traceback(cluster: Any) -> None:
    def body() -> None:
        comm = lockstep.init()
        comm.barrier()
        if comm.rank == 1:
            raise KeyError("of the program")
        comm.barrier()

    with pytest.raises(lockstep.WorkerError) as caught:
        lockstep.ray.launch(body, workers=2)
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
    assert 'raise KeyError("of the program")' in caught.value.worker_traceback
    assert "test_ray.py" in caught.value.worker_traceback
    assert_nothing_left()


def test_the_watchdogs_report_on_a_desync_reaches_the_driver(cluster: Any) -> None:
    def body() -> None:
        comm = lockstep.init()
        comm.barrier()
        if comm.rank == 1:
            comm.broadcast(torch.ones(4), 0)
        else:
            comm.allreduce(torch.ones(4))

    with pytest.raises(lockstep.DesyncError) as caught:
        lockstep.ray.launch(body, workers=2)
    assert "Desync at collective #2" in str(caught.value)
    assert "What to do" in str(caught.value)
    assert caught.value.report_json


def test_a_rank_that_is_killed_is_named(cluster: Any) -> None:
    def body() -> None:
        comm = lockstep.init()
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    with pytest.raises(lockstep.WorkerError, match="killed by SIGKILL") as caught:
        lockstep.ray.launch(body, workers=2)
    assert caught.value.rank == 1
    assert "Rank 1 died while other ranks waited for it" in str(caught.value)
    assert_nothing_left()


def test_the_same_error_on_all_ranks_is_raised_as_it_is(cluster: Any) -> None:
    def body() -> None:
        raise lockstep.ConfigError("lr", "a number above 0", -1)

    with pytest.raises(lockstep.ConfigError, match="lr: expected a number above 0, got -1"):
        lockstep.ray.launch(body, workers=2)


def test_errors_on_several_nodes_are_those_of_one(cluster: Any) -> None:
    def alike() -> None:
        lockstep.init()
        raise lockstep.ConfigError("lr", "a number above 0", -1)

    def desync() -> None:
        comm = lockstep.init()
        comm.barrier()
        if comm.rank == 1:
            comm.broadcast(torch.ones(4), 0)
        else:
            comm.allreduce(torch.ones(4))

    def of_one() -> None:
        comm = lockstep.init()
        comm.barrier()
        if comm.rank == 1:
            raise KeyError("of the program")
        comm.barrier()

    nodes = [add_node(cluster, "pair", 1) for _ in range(2)]
    cluster.wait_for_nodes()
    try:
        with pytest.raises(lockstep.ConfigError, match="lr: expected a number above 0, got -1"):
            lockstep.ray.launch(alike, workers=2, resources={"pair": 1})
        with pytest.raises(lockstep.DesyncError, match="Desync at collective #2"):
            lockstep.ray.launch(desync, workers=2, resources={"pair": 1})
        with pytest.raises(lockstep.WorkerError, match="of the program") as caught:
            lockstep.ray.launch(of_one, workers=2, resources={"pair": 1})
    finally:
        for node in nodes:
            cluster.remove_node(node)
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
    assert 'raise KeyError("of the program")' in caught.value.worker_traceback
    assert_nothing_left()


def test_more_workers_than_the_cluster_has_cpus_for_are_an_error_at_once(cluster: Any) -> None:
    with pytest.raises(
        lockstep.ConfigError,
        match=r"at most 4: each needs 1 CPU, .* 4 CPU on 1 node, got 6 \(2 CPU m",
    ):
        lockstep.ray.launch(print, workers=6)
    with pytest.raises(lockstep.ConfigError, match="at most 0: each needs 1 GPU"):
        lockstep.ray.launch(print, workers=2, resources={"GPU": 1})
    with pytest.raises(lockstep.ConfigError, match="at most 4: each needs 1 CPU"):
        lockstep.ray.launch(print, workers=(6, 8))
    assert_nothing_left()


def test_a_function_uses_rays_own_api_and_handles_of_actors(cluster: Any) -> None:
    def body(counter: Any) -> tuple[int, list[int]]:
        import ray

        comm = lockstep.init()
        own = ray.get(ray.put(comm.rank))
        return own, sorted(comm.allgather_object(ray.get(counter.next.remote())))

    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def next(self) -> int:
            self.count += 1
            return self.count

    counter = ray.remote(Counter).options(num_cpus=0).remote()
    try:
        assert lockstep.ray.launch(body, counter, workers=2) == (0, [1, 2])
    finally:
        ray.kill(counter)


def test_a_reference_to_an_object_of_ray_is_refused_by_name(cluster: Any) -> None:
    with pytest.raises(lockstep.ConfigError, match=r"args\[0\].*pass the value of ray.get"):
        lockstep.ray.launch(print, ray.put(1), workers=2)


def test_workers_of_one_node_see_gpus_of_their_own(cluster: Any) -> None:
    node = cluster.add_node(num_cpus=1, num_gpus=4, object_store_memory=MEMORY)
    cluster.wait_for_nodes()

    def body() -> list[str]:
        return lockstep.init("cpu").allgather_object(os.environ["CUDA_VISIBLE_DEVICES"])

    try:
        pairs = lockstep.ray.launch(body, workers=2, resources={"GPU": 2})
        halves = lockstep.ray.launch(body, workers=3, resources={"GPU": 0.5})
    finally:
        cluster.remove_node(node)
    assert sorted(device for pair in pairs for device in pair.split(",")) == ["0", "1", "2", "3"]
    assert halves[0] == halves[1] != halves[2]
    assert_nothing_left()


def test_what_cannot_be_pickled_is_named(cluster: Any) -> None:
    with pytest.raises(
        lockstep.ConfigError, match=r"args\[0\]: expected an object that can be pickled"
    ):
        lockstep.ray.launch(print, threading.Lock(), workers=2)


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "InterruptedRunError"])
def test_a_signal_ends_the_workers_and_leaves_nothing_behind(
    cluster: Any, tmp_path: Path, kind: str
) -> None:
    def body(folder: Path) -> None:
        comm = lockstep.init()
        (folder / f"runs-{comm.rank}").touch()
        time.sleep(LIMIT_S)

    def interrupt() -> None:
        wait_for(lambda: len(list(tmp_path.glob("runs-*"))) == 2, "running workers")
        os.kill(os.getpid(), signal.SIGINT if kind == "KeyboardInterrupt" else signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:  # which ends this process before the launch has begun
        signal.signal(signal.SIGTERM, lambda *_: None)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises((KeyboardInterrupt, lockstep.InterruptedRunError)) as caught:
            lockstep.ray.launch(body, tmp_path, workers=2)
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert caught.type.__name__ == kind
    assert_nothing_left()


def test_a_node_that_is_removed_is_named(cluster: Any, tmp_path: Path) -> None:
    def body(folder: Path) -> None:
        comm = lockstep.init()
        comm.barrier()
        (folder / f"node-{comm.rank}").write_text(f"{comm.world.node} of {comm.world.nodes}")
        if comm.rank == 0:
            comm.barrier()
        time.sleep(LIMIT_S)

    nodes = [add_node(cluster, "fixed", 1) for _ in range(2)]
    cluster.wait_for_nodes()
    with ThreadPoolExecutor(1) as pool:  # the cluster can be changed in the main thread only
        job = pool.submit(lockstep.ray.launch, body, tmp_path, workers=2, resources={"fixed": 1})
        wait_for(lambda: len(list(tmp_path.glob("node-*"))) == 2 or job.done(), "running workers")
        cluster.remove_node(nodes[1], allow_graceful=False)
        with pytest.raises(lockstep.WorkerError, match=r"its node .* was lost") as caught:
            job.result(LIMIT_S)
    cluster.remove_node(nodes[0])
    assert sorted(path.read_text() for path in tmp_path.glob("node-*")) == ["0 of 2", "1 of 2"]
    assert caught.value.kind == "exit"
    assert_nothing_left()


def test_an_agent_that_is_killed_is_told_apart_from_its_node(cluster: Any, tmp_path: Path) -> None:
    def body(folder: Path) -> None:
        lockstep.init().barrier()
        (folder / f"runs-{os.getpid()}").touch()
        time.sleep(LIMIT_S)

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(lockstep.ray.launch, body, tmp_path, workers=2)
        wait_for(lambda: len(list(tmp_path.glob("runs-*"))) == 2 or job.done(), "running workers")
        (agent,) = living_actors()
        os.kill(agent["Pid"], signal.SIGKILL)
        with pytest.raises(lockstep.WorkerError, match=r"its agent on .* died without") as caught:
            job.result(LIMIT_S)
    assert (caught.value.rank, caught.value.kind) == (0, "exit")
    assert_nothing_left()
    wait_for(
        lambda: not any(Path(f"/proc/{each.name[5:]}").exists() for each in tmp_path.iterdir()),
        "end of the workers",
    )


# --- elastic jobs
# --------------------------------------------------------------------------------------------------

EPOCHS, GATE = 60, 20


def training() -> Callable[..., tuple[str, int]]:
    def body(folder: Path | None) -> tuple[str, int]:
        comm = lockstep.init("cpu")
        if folder is not None:
            (folder / f"started-{os.getpid()}").touch()

        class Gate(lockstep.callbacks.Callback):
            every_rank = True

            def on_train_step_end(self, trainer: Any, result: Any) -> None:
                if folder is None:
                    return
                if result.step == GATE:  # until the node is lost
                    (folder / f"at-gate-{os.getpid()}").touch()
                    wait_for(lambda: (folder / "lost").exists(), "loss")
                if result.step == 2 * GATE:  # until the program runs on the node that is added
                    (folder / "goes-on").touch()
                    wait_for(
                        lambda: len(list(folder.glob("started-*"))) > 4, "worker on the added node"
                    )
                if result.step > 2 * GATE:
                    time.sleep(0.02)
                    if comm.size > 2:
                        (folder / "joined").touch()

        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
        layers = (
            torch.nn.Linear(8, 16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 3),
        )
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        loss = torch.nn.CrossEntropyLoss()
        trainer = lockstep.Trainer(
            model, optimizer, loss, 12, virtual_workers=4, callbacks=[Gate()]
        )
        trainer.fit(data, EPOCHS)
        return lockstep.fingerprint(model, optimizer), comm.size

    return body


def test_a_job_survives_the_loss_of_a_node_and_uses_an_added_one_with_equal_bits(
    cluster: Any, tmp_path: Path
) -> None:
    expected, _ = lockstep.ray.launch(training(), None, workers=1)
    nodes = [add_node(cluster, "elastic") for _ in range(2)]
    cluster.wait_for_nodes()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            lockstep.ray.launch, training(), tmp_path, workers=(1, 4), resources={"elastic": 1}
        )
        wait_for(
            lambda: len(list(tmp_path.glob("at-gate-*"))) == 4 or job.done(), "workers at the gate"
        )
        cluster.remove_node(nodes[0], allow_graceful=False)
        (tmp_path / "lost").touch()
        wait_for(lambda: (tmp_path / "goes-on").exists() or job.done(), "step after the loss")
        nodes[0] = add_node(cluster, "elastic")
        found, size = job.result(LIMIT_S)
    for node in nodes:
        cluster.remove_node(node)
    assert (tmp_path / "joined").exists()
    assert size == 4
    assert found == expected
    assert_nothing_left()


def test_the_error_of_a_worker_ends_an_elastic_job_and_names_it(cluster: Any) -> None:
    def body() -> None:
        comm = lockstep.init()
        if comm.rank == 1:
            raise KeyError("of the program")
        comm.barrier()

    with pytest.raises(lockstep.WorkerError, match="of the program") as caught:
        lockstep.ray.launch(body, workers=(2, 2))
    assert 'raise KeyError("of the program")' in caught.value.worker_traceback
    assert_nothing_left()


# --- a group that is there already
# ------------------------------------------------------------------------------------


def train_in_group() -> Callable[..., tuple[str, int]]:
    def body() -> tuple[str, int]:
        import torch.distributed as dist

        before = dist.group.WORLD
        comm = lockstep.init()
        assert comm.group is before
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
        model = torch.nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = lockstep.Trainer(
            model, optimizer, torch.nn.CrossEntropyLoss(), 12, virtual_workers=2
        )
        trainer.fit(data, 2)
        return lockstep.fingerprint(model), comm.size

    return body


def test_init_takes_the_group_of_ray_train(cluster: Any, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    train = train_in_group()

    def body(config: dict[str, Any]) -> None:
        import ray.train

        found, size = train()
        (tmp_path / f"found-{ray.train.get_context().get_world_rank()}").write_text(
            f"{found} {size}"
        )

    scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=str(tmp_path / "ray"))
    TorchTrainer(body, scaling_config=scaling, run_config=run).fit()
    found = [path.read_text() for path in tmp_path.glob("found-*")]
    assert len(found) == 2
    assert len(set(found)) == 1
    assert found[0].endswith(" 2")


def test_init_takes_the_group_that_actors_have_made(cluster: Any, tmp_path: Path) -> None:
    train = train_in_group()

    class Own:
        def run(self, rank: int) -> tuple[str, int]:
            import torch.distributed as dist

            dist.init_process_group(
                "gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2
            )
            return train()

    actors = [ray.remote(Own).options(num_cpus=1).remote() for _ in range(2)]
    found = ray.get([actor.run.remote(rank) for rank, actor in enumerate(actors)])
    for actor in actors:
        ray.kill(actor)
    assert found[0] == found[1]
    assert found[0][1] == 2
