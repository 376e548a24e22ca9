"""A Slurm of two nodes on this host: its own munged, slurmctld and two slurmd, which are gone at
its end.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["NODES", "Slurm", "make_cluster", "missing"]

NODES = ("127.0.0.2", "127.0.0.3")
"""The names of the nodes: on a cluster names can be resolved, and here these can."""

_PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "scancel",
    "scontrol",
    "squeue",
    "sinfo",
)
_START_S, _STOP_S = 60.0, 20.0

# Neither systemd nor cgroups nor an accounting database are needed.
_CONFIG = """
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_interval=1
SlurmctldTimeout=300
KillWait=20
MinJobAge=300
{nodes}
PartitionName=main Nodes={names} Default=YES DefaultTime=10 MaxTime=60 State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    names = [name for name in _PROGRAMS if _which(name) is None]
    return (
        f"not installed: {', '.join(names)} (apt-get install slurm-wlm munge, or make test-cluster)"
        if names
        else ""
    )


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Slurm:
    """The cluster, as its user meets it.

    Attributes:
        folder: of its configuration, state and logs.
        environment: of the programs that shall find it.
    """

    folder: Path
    environment: dict[str, str]

    def run(
        self, *words: object, cwd: Path, limit: float = 100.0
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands, or a program that calls them."""
        command = [str(word) for word in words]
        return subprocess.run(
            command,
            cwd=cwd,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
        )

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says about a job: JobState, ExitCode, Restarts and so on."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number, cwd=self.folder)
        return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)

    def wait_for_job(self, number: str, *states: str, limit: float = 100.0) -> dict[str, str]:
        """Wait until a job is in one of `states`."""
        found: dict[str, str] = {}

        def is_there() -> bool:
            found.update(self.job(number))
            return found.get("JobState") in states

        wait_for(is_there, lambda: f"job {number} is {found}, not {states}", limit)
        return found

    def end_jobs(self) -> None:
        """End all jobs at once."""
        for line in self.run("squeue", "--noheader", "--format=%A", cwd=self.folder).stdout.split():
            self.run("scancel", "--signal=KILL", "--full", line, cwd=self.folder)
            self.run("scancel", line, cwd=self.folder)


def wait_for(is_there: Callable[[], bool], problem: Callable[[], str], limit: float = 60.0) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + limit
    while not is_there():
        if time.monotonic() > deadline:
            raise AssertionError(problem())
        time.sleep(0.2)


@contextmanager
def make_cluster() -> Iterator[Slurm]:
    """Start a cluster, and stop and remove it whatever happens.

    Raises:
        OSError: a daemon cannot be started here.
    """
    # a short path: the name of a socket has at most 107 bytes
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "SPT_NOENV": "1"}
    environment["PATH"] = f"{environment['PATH']}:/usr/sbin:/sbin"
    cluster = Slurm(folder, environment)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(_end_processes, folder)
        _configure(folder)
        _start(stack, cluster, "munged", "--foreground", "--force", *_munge_options(folder))
        wait_for((folder / "munge.socket").exists, lambda: _log(folder, "munged"))
        _start(stack, cluster, "slurmctld", "-D", "-c")
        for name in NODES:
            _start(stack, cluster, "slurmd", "-D", "-N", name)
        stack.callback(cluster.end_jobs)
        _wait_until_idle(cluster)
        yield cluster


def _configure(folder: Path) -> None:
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    host, nodes = socket.gethostname().partition(".")[0], ""
    for name in NODES:
        nodes += (
            f"NodeName={name} NodeHostname={host} NodeAddr={name} Port={_free_port()} CPUs=2 "
            "State=UNKNOWN\n"
        )
    user = pwd.getpwuid(os.getuid()).pw_name
    text = _CONFIG.format(
        folder=folder,
        host=host,
        port=_free_port(),
        user=user,
        nodes=nodes.strip(),
        names=",".join(NODES),
    )
    (folder / "slurm.conf").write_text(text)


def _munge_options(folder: Path) -> list[str]:
    names = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "seed-file": "munged.seed",
    }
    return [f"--{option}={folder / name}" for option, name in names.items()]


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _start(stack: ExitStack, cluster: Slurm, name: str, *options: str) -> None:
    log = cluster.folder / f"{name}{options[-1] if name == 'slurmd' else ''}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(_which(name)), *options],
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cluster.folder,
            start_new_session=True,
        )
    stack.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_processes(folder: Path) -> None:
    """Kill what jobs have left: everything that knows this cluster, besides this process."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("SLURM_CONF") == str(
                folder / "slurm.conf"
            ):
                process.kill()


def _wait_until_idle(cluster: Slurm) -> None:
    states: list[str] = []

    def are_idle() -> bool:
        states[:] = cluster.run(
            "sinfo", "--Node", "--noheader", "--format=%T", cwd=cluster.folder
        ).stdout.split()
        return states == ["idle"] * len(NODES)

    wait_for(are_idle, lambda: f"nodes are {states}\n{_log(cluster.folder, 'slurmctld')}", _START_S)


def _log(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    return path.read_text(errors="replace")[-2000:] if path.exists() else f"no {path.name}"
