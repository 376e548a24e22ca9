"""Workers find a rendezvous that is theirs alone, or an error says which variables to set."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from lockstep import bootstrap, environment
from lockstep.bootstrap import Rendezvous, find_rendezvous, open_store
from lockstep.environment import find_world
from lockstep.errors import ConfigError, StallError, TransportError
from lockstep.topology import World
from support.openings import SQUATS, listens_at, squat

SHORT = timedelta(milliseconds=20)
ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_JOB_ID": "70",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[03-04]",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPENMPI = {
    f"OMPI_COMM_WORLD_{name}": n for name, n in (("RANK", "1"), ("SIZE", "4"), ("LOCAL_RANK", "1"))
}
OPENMPI["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2"
HOROVOD = {
    f"HOROVOD_{name}": n
    for name, n in (("RANK", "1"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))
}
HOROVOD |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000"}
ONE_NODE = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}


@pytest.fixture
def mpi4py(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whether mpi4py is installed: as what is in the list is true or not."""
    there: list[object] = [object()]
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: there[0])
    return there


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of a rendezvous are, instead of the folder for temporary files."""
    monkeypatch.setattr(bootstrap.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"lockstep-{os.getuid()}"


def rendezvous(variables: Mapping[str, str]) -> Rendezvous:
    return find_rendezvous(find_world(variables), variables)


# --- which way
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables", [{"RANK": "0", "WORLD_SIZE": "2"}, STEP, MPICH, OPENMPI, HOROVOD]
)
def test_an_address_that_is_given_is_taken(variables: Mapping[str, str]) -> None:
    assert rendezvous({**variables, **ADDRESS}) == Rendezvous("address")


@pytest.mark.parametrize("variables", [{"RANK": "0", "WORLD_SIZE": "2"}, STEP, MPICH])
@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_half_an_address_is_refused(variables: Mapping[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=f"got {name} alone. S.* both"):
        rendezvous({**variables, name: ADDRESS[name]})


def test_torchruns_variables_need_an_address() -> None:
    with pytest.raises(ConfigError, match=r"expected MASTER_ADDR and MASTER_PORT .* got neither"):
        rendezvous({"RANK": "0", "WORLD_SIZE": "2"})


def test_under_srun_the_rendezvous_is_at_the_steps_first_node() -> None:
    found = rendezvous(STEP)
    assert (found.kind, found.host) == ("tcp", "node03")
    assert 10_000 <= found.port < 30_000


def test_neighbouring_steps_and_jobs_of_srun_have_ports_of_their_own() -> None:
    places = [
        {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        for job in range(100, 110)
        for step in range(97)
    ]
    found_by_place = [rendezvous({**STEP, **place}) for place in places]
    assert (
        len({found.port for found in found_by_place})
        == len({found.job for found in found_by_place})
        == len(places)
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"SLURM_STEP_NODELIST": "node["},
            "SLURM_STEP_NODELIST: expected a list of nodes .* got 'node\\['",
        ),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST: expected a list of nodes"),
        (
            {"SLURM_JOB_ID": ""},
            "SLURM_JOB_ID, SLURM_STEP_ID: expected whole numbers, got '' and '1'",
        ),
    ],
)
def test_variables_that_srun_has_not_set_are_named(change: Mapping[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        rendezvous({**STEP, **change})


@pytest.mark.parametrize("variables", [MPICH, OPENMPI])
def test_mpi_gives_the_ranks_on_several_hosts(
    variables: Mapping[str, str], mpi4py: list[object]
) -> None:
    assert rendezvous(variables) == Rendezvous("mpi")
    mpi4py[0] = None
    with pytest.raises(ConfigError, match=r"Set both for all workers .* or install mpi4py"):
        rendezvous(variables)


def test_horovod_on_several_hosts_needs_an_address(mpi4py: list[object]) -> None:
    with pytest.raises(ConfigError, match=r"several hosts \(horovod\).* a free port there\)\.$"):
        rendezvous(HOROVOD)


@pytest.mark.parametrize(
    ("variables", "change", "other"),
    [
        ({**STEP, **ONE_NODE}, {"SLURM_PROCID": "2"}, {"SLURM_STEP_ID": "2"}),
        ({**STEP, **ONE_NODE}, {"SLURM_LOCALID": "2"}, {"SLURM_RESTART_COUNT": "1"}),
        (
            {**HOROVOD, "HOROVOD_SIZE": "2"},
            {"HOROVOD_RANK": "0"},
            {"HOROVOD_GLOO_RENDEZVOUS_PORT": "4001"},
        ),
    ],
)
def test_ranks_of_one_host_have_one_rendezvous(
    variables: Mapping[str, str], change: Mapping[str, str], other: Mapping[str, str]
) -> None:
    found = rendezvous(variables)
    assert found.kind == "local"
    assert rendezvous({**variables, **change}) == found
    assert rendezvous({**variables, **other}) != found


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_ranks_of_mpiexec_know_it_through_shells_between_them() -> None:
    """The launcher is the nearest process without the rank's own variables."""
    told = (
        "from lockstep import environment; from lockstep.environment.launchers import "
        "launcher_identity; "
    )
    told += "print(launcher_identity(environment.variables()))"
    variables = {**environment.variables(), **MPICH}
    direct = subprocess.run(
        [sys.executable, "-c", told], env=variables, capture_output=True, text=True, check=True
    )
    shell = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, told]
    wrapped = subprocess.run(
        shell, env={**variables, "PMI_RANK": "0"}, capture_output=True, text=True, check=True
    )
    assert direct.stdout == wrapped.stdout
    assert direct.stdout.split()[0] == str(os.getpid())


# --- the store
# ------------------------------------------------------------------------------------------------


def here(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    found = {**STEP, **ONE_NODE, **variables}
    monkeypatch.setattr(environment, "variables", lambda: found)
    for change in (
        monkeypatch.setenv,
        lambda name, _: monkeypatch.delenv(name),
    ):  # to be as it is now afterwards
        change("GLOO_SOCKET_IFNAME", "")


def ranks(size: int) -> list[World]:
    return [World(rank, size, rank, size, source="slurm") for rank in range(size)]


def test_workers_of_one_host_rendezvous_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    here(monkeypatch)
    for _ in range(2):  # the same job may meet again
        first, *others = [open_store(world, timedelta(seconds=20)) for world in ranks(3)]
        assert isinstance(first, TCPStore)
        first.set("key", "value")
        assert all(store is not None and store.get("key") == b"value" for store in others)
        assert list(folder.iterdir()) == []
        assert folder.stat().st_mode & 0o777 == 0o700
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        del first, others


def test_jobs_on_one_host_have_separate_rendezvous(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    here(monkeypatch)
    stores = [open_store(ranks(2)[0], SHORT)]
    here(monkeypatch, SLURM_STEP_ID="2")
    with pytest.raises(StallError, match=r"rank 1 waited 0.02 s for rank 0") as caught:
        open_store(ranks(2)[1], SHORT)
    assert caught.value.ranks == (0,)
    assert len(list(folder.iterdir())) == 1  # of the first job, which still waits
    del stores


@pytest.mark.parametrize(
    "runtime", [True, False], ids=["runtime directory", "no runtime directory"]
)
@pytest.mark.parametrize("kind", SQUATS)
def test_nobody_can_prevent_the_rendezvous_of_workers(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, kind: str, runtime: bool
) -> None:
    """The folder's name can be guessed, and anybody may make folders beside it."""
    here(monkeypatch)
    squat(folder, kind)
    own = tmp_path / "runtime"
    own.mkdir(mode=0o700)
    monkeypatch.setattr(environment, "runtime_dir", lambda: own if runtime else None)
    before = set(tmp_path.iterdir())
    with ThreadPoolExecutor(3) as threads:  # rank 0 comes last
        stores = list(
            threads.map(lambda world: open_store(world, timedelta(seconds=20)), reversed(ranks(3)))
        )
    assert isinstance(stores[-1], TCPStore)
    stores[-1].set("key", "value")
    assert all(store is not None and store.get("key") == b"value" for store in stores)
    assert set(tmp_path.iterdir()) == before
    assert [path.name for path in own.iterdir()] == (["lockstep"] if runtime else [])
    if folder.is_dir():
        assert list(folder.iterdir()) == []  # nothing is entrusted to what others can change


def test_without_any_folder_the_error_names_the_variable_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here(monkeypatch)
    monkeypatch.setattr(environment, "runtime_dir", lambda: None)
    monkeypatch.setattr(bootstrap.tempfile, "gettempdir", lambda: str(tmp_path / "not there"))
    with pytest.raises(TransportError, match=r"no private folder .*not there.* Set TMPDIR"):
        open_store(ranks(1)[0], SHORT)


def test_workers_on_several_nodes_rendezvous_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    monkeypatch.setattr(
        environment, "variables", lambda: {**STEP, "SLURM_STEP_NODELIST": "localhost"}
    )
    monkeypatch.setattr(bootstrap, "_step_port", lambda variables: port)
    first, second = (
        open_store(World(rank, 2, source="slurm", nodes=2), timedelta(seconds=20))
        for rank in range(2)
    )
    assert first is not None
    assert second is not None
    first.set("key", "value")
    assert second.get("key") == b"value"
    stray_step = {**STEP, "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_ID": "2"}
    monkeypatch.setattr(environment, "variables", lambda: stray_step)
    stray = open_store(World(1, 2, source="slurm", nodes=2), timedelta(seconds=20))
    assert stray is not None
    assert not stray.check(["key"])  # of another job, which happens to have the same port
    with pytest.raises(
        TransportError,
        match=f"rank 0 cannot rendezvous at localhost:{port}.* Set MASTER_ADDR and MASTER_PORT",
    ):
        open_store(World(0, 2, source="slurm", nodes=2), SHORT)


def test_a_node_that_cannot_be_looked_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        environment, "variables", lambda: {**STEP, "SLURM_STEP_NODELIST": "no..such"}
    )
    with pytest.raises(
        ConfigError,
        match=r"SLURM_STEP_NODELIST: expected names .* got no\.\.such: .* Set MASTER_ADDR",
    ):
        open_store(World(0, 2, source="slurm", nodes=2), SHORT)


def test_a_store_over_mpi_is_made_by_the_given_function(
    monkeypatch: pytest.MonkeyPatch, mpi4py: list[object]
) -> None:
    monkeypatch.setattr(environment, "variables", lambda: MPICH)
    store = HashStore()
    assert open_store(find_world(MPICH), over_mpi=lambda: store) is store
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        open_store(find_world(MPICH))


def test_an_address_that_a_launcher_serves_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for more in (
        {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        {"MASTER_PORT": "70000"},
        {"MASTER_PORT": "x"},
    ):
        given = {**MPICH, **ADDRESS, **more}
        monkeypatch.setattr(environment, "variables", lambda given=given: given)
        assert open_store(find_world(MPICH)) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_at_a_given_address_rank_0_listens_there_alone(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """As torch's env:// does, which listens on all interfaces."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = {**MPICH, "MASTER_ADDR": address, "MASTER_PORT": str(port), "MPI_LOCALNRANKS": "4"}
    monkeypatch.setattr(environment, "variables", lambda: given)
    first, second = (
        open_store(find_world({**given, "PMI_RANK": rank}), timedelta(seconds=20)) for rank in "01"
    )
    assert first is not None and second is not None
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert listens_at(port) == {"127.0.0.1"}
    again = open_store(find_world({**given, "PMI_RANK": "0"}), timedelta(seconds=20))
    assert (
        again is not None and again.get("key") == b"value"
    )  # this process's own store is shared, as env:// does
