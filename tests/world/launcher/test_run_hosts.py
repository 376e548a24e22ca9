"""`lockstep run` on several hosts: network namespaces with host names and a real sshd."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.hosts import or_skip
from support.sshd import Hosts, make_hosts

DEADLINE = 100.0  # seconds that a test waits for what must happen

HEAD = """
import os, socket, subprocess, sys, time
import torch, torch.distributed as dist
rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), socket.gethostname()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""

MEET = """
dist.init_process_group("gloo")
total = torch.tensor([float(rank)])
dist.all_reduce(total)
"""

TRAIN = f"""
{MEET}
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(rank + step))).sum().backward()
    optimizer.step()
weights = sum(weight.detach().sum().item() for weight in model.parameters())
dist.destroy_process_group()
import lockstep
comm = lockstep.init()
total = comm.allreduce(torch.tensor([float(rank)])).item()
kind = type(dist.group.WORLD).__name__
interface, local, of = (os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
print(rank, size, host, comm.node, comm.nodes, f"{{local}}/{{of}}", interface, kind, total, f"{{weights:.5f}}")
"""

# the job's store, on the first host, and no other host's ports
NARROW = """
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").read().splitlines()[1:]]
port, its = int(os.environ["MASTER_PORT"]), socket.inet_aton(os.environ["MASTER_ADDR"])[::-1].hex().upper()
found = [line[1].split(":")[0] for line in lines if line[3] == "0A" and int(line[1].split(":")[1], 16) == port]
assert found == ([its] if rank == 0 else found), (found, its)
"""

WAIT = f"""
{MEET}
subprocess.Popen(["sleep", "1000"])
print("READY", flush=True)
dist.barrier() if rank else time.sleep(1000)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts, alpha and beta."""
    with or_skip(make_hosts(2, tmp_path_factory.mktemp("hosts"))) as found:
        yield found


def write(folder: Path, body: str, name: str = "program.py") -> Path:
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(body))
    return path


@contextmanager
def started(
    hosts: Hosts, *words: object, on: str = "", cwd: Path | None = None, path: str = "", **env: str
) -> Iterator[subprocess.Popen[str]]:
    """`lockstep run` with `words`, on the host `on` or on this one."""
    command = [
        *(hosts.inside(on) if on else ()),
        sys.executable,
        "-m",
        "lockstep",
        "run",
        *map(str, words),
    ]
    variables = {**os.environ, "PATH": path or hosts.path, "OMP_NUM_THREADS": "1", **env}
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=variables,
        stdin=-1,
        stdout=-1,
        stderr=-1,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Its exit code, the lines of its standard output sorted, and its standard error without the
    store's warnings.
    """
    out, err = process.communicate(timeout=DEADLINE)
    kept = [line for line in err.splitlines() if "[c10d]" not in line]
    return process.returncode, sorted(out.splitlines()), "\n".join(kept)


def run(
    hosts: Hosts, *words: object, cwd: Path | None = None, path: str = ""
) -> tuple[int, list[str], str]:
    with started(hosts, *words, cwd=cwd, path=path) as process:
        return end(process)


def processes(hosts: Hosts) -> list[str]:
    """What runs on the hosts beside sshd."""
    return [f"{name}: {program}" for name in hosts.namespaces for program in hosts.programs(name)]


def wait_until_gone(hosts: Hosts) -> None:
    deadline = time.monotonic() + DEADLINE
    while left := processes(hosts):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def wait_until_ready(process: subprocess.Popen[str], ranks: int) -> None:
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(ranks)) == [
        f"[{rank}] READY\n" for rank in range(ranks)
    ]


def wanted(shares: Sequence[tuple[str, int]]) -> list[str]:
    """What TRAIN writes, up to the weights."""
    size, lines = sum(share for _, share in shares), []
    for node, (host, share) in enumerate(shares):
        for local in range(share):
            place = f"{size} {host} {node} {len(shares)} {local}/{share} eth0 HierarchicalGroup"
            lines.append(f"[{len(lines)}] {len(lines)} {place} {size * (size - 1) / 2}")
    return lines


def assert_trained(lines: list[str], shares: Sequence[tuple[str, int]]) -> None:
    assert [line.rpartition(" ")[0] for line in lines] == wanted(shares)
    assert len({line.rpartition(" ")[2] for line in lines}) == 1


def test_two_jobs_at_once_train_on_hosts_with_different_numbers_of_slots(
    hosts: Hosts, tmp_path: Path
) -> None:
    checks = (
        'assert sys.argv[1:] == ["a b", "it\'s", "$HOME", "--", "-H"]; assert os.environ["MINE"] '
        '== "x y"\n'
    )
    program = write(tmp_path, checks + NARROW + TRAIN)
    (tmp_path / "hosts").write_text("# mine\nroot@alpha slots=2\nbeta:1\n")
    arguments = (program.name, "a b", "it's", "$HOME", "--", "-H")
    with (
        started(
            hosts, "--hostfile", "hosts", "-x", "MINE", *arguments, cwd=tmp_path, MINE="x y"
        ) as first,
        started(
            hosts, "-H", "beta,alpha", "-x", "MINE=x y", "-q", *arguments, cwd=tmp_path
        ) as second,
    ):
        code, out, err = end(first)
        assert (code, err) == (0, "lockstep run: 3 workers: alpha 2, beta 1")
        assert_trained(out, [("alpha", 2), ("beta", 1)])
        code, out, err = end(second)
        assert (code, err) == (0, "")
        assert_trained(out, [("beta", 1), ("alpha", 1)])
    wait_until_gone(hosts)


def test_all_start_afresh_and_then_the_first_failure_is_shown_with_its_host(
    hosts: Hosts, tmp_path: Path
) -> None:
    body = f"""
    {MEET.strip().replace(chr(10), chr(10) + "    ")}
    print("met in attempt", attempt, total.item())
    def fail():
        if attempt:
            while not os.path.exists("{tmp_path}/rank 3 waits"):
                time.sleep(0.01)
            sys.stdout.flush()
            raise ValueError("on purpose\\nin two lines")
        sys.exit(3)
    if rank == 2:
        fail()
    work = dist.all_reduce(total, async_op=True)
    if attempt and rank == 3:
        open("{tmp_path}/rank 3 waits", "w").close()
    work.wait()
    dist.all_reduce(total)
    """
    program = write(tmp_path, body)
    code, out, err = run(hosts, "-H", "alpha:2,beta:2", "--restarts", 1, program)
    assert [line for line in out if "met" in line] == [
        f"[{rank}] met in attempt {attempt} 6.0" for rank in range(4) for attempt in range(2)
    ]
    assert code == 1
    assert "restarting the workers after rank 2: SystemExit: ended with exit code 3" in err
    said = err[err.index("lockstep run: error:") :]
    assert said.startswith(
        "lockstep run: error: rank 2 on beta: ValueError: on purpose\nin two lines\n\nRank 2 raised"
    )
    assert re.search(r"^  3 +beta .* all_reduce", said, re.MULTILINE), said
    assert said.endswith("ValueError: on purpose\nin two lines")
    assert said.count("Traceback (most recent call last)") == 1
    assert "    fail()" in said
    wait_until_gone(hosts)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_is_left_after_a_signal_to_the_launcher(
    hosts: Hosts, tmp_path: Path, number: int, code: int
) -> None:
    with started(hosts, "-H", "alpha:2,beta:2", write(tmp_path, WAIT)) as process:
        wait_until_ready(process, 4)
        os.kill(process.pid, number)
        ended, _, err = end(process)
        assert ended == code
        assert "Traceback" not in err
        wait_until_gone(hosts)


def test_a_job_ends_when_a_host_is_disconnected(hosts: Hosts, tmp_path: Path) -> None:
    soon = {"LOCKSTEP_HEARTBEAT_TIMEOUT": "6"}
    with started(hosts, "-H", "alpha,beta", write(tmp_path, WAIT), **soon) as process:
        wait_until_ready(process, 2)
        hosts.link("beta", "down")
        try:
            code, _, err = end(process)
            assert code == 255 or code == 1
            assert err.splitlines()[-1].startswith(
                "lockstep run: error: lost beta: the connection broke"
            )
            wait_until_gone(hosts)  # the part of the job that is cut off ends too
        finally:
            hosts.link("beta", "up")


def test_launchers_started_by_hand_join_and_agree_on_the_first_failure(
    hosts: Hosts, tmp_path: Path
) -> None:
    program = write(tmp_path, MEET + "if rank == 1: raise ValueError('of beta')\ndist.barrier()\n")
    words = ("--nnodes", 2, "--master-addr", hosts.addresses["alpha"], "-q")
    with (
        started(hosts, *words, "--node-rank", 1, program, on="beta") as other,
        started(hosts, *words, "--node-rank", 0, program, on="alpha") as first,
    ):
        ended = [end(first), end(other)]
    for code, _, err in ended:
        assert code == 1
        assert "lockstep run: error: rank 1 on beta: ValueError: of beta" in err
    assert [err.count("Traceback (most recent call last)") for _, _, err in ended] == [1, 1]
    wait_until_gone(hosts)


def test_ctrl_c_on_one_host_is_what_the_others_report_when_its_workers_have_left(
    hosts: Hosts, tmp_path: Path
) -> None:
    program = write(tmp_path, WAIT)
    words = ("--nnodes", 2, "--master-addr", hosts.addresses["alpha"], "-np", 1)
    with (
        started(hosts, *words, "--node-rank", 1, program, on="beta") as other,
        started(hosts, *words, "--node-rank", 0, program, on="alpha") as first,
    ):
        for process in (first, other):
            assert process.stdout is not None
            assert "READY" in process.stdout.readline()
        os.kill(first.pid, signal.SIGINT)
        ended = [end(first), end(other)]
    assert [code for code, _, _ in ended] == [130, 130], ended
    assert "stopped by SIGINT on alpha" in ended[1][2].splitlines()[-1]
    wait_until_gone(hosts)


def test_launchers_that_slurm_starts_find_each_other(hosts: Hosts, tmp_path: Path) -> None:
    program = write(tmp_path, TRAIN)
    step = {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NODELIST": hosts.addresses["alpha"],
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    places = [
        {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
        for node in range(2)
    ]
    with (
        started(hosts, "-np", 2, program, on="alpha", **step, **places[0]) as one,
        started(hosts, "-np", 1, program, on="beta", **step, **places[1]) as other,
    ):
        ended = [end(one), end(other)]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert_trained([*ended[0][1], *ended[1][1]], [("alpha", 2), ("beta", 1)])


def test_hosts_that_cannot_be_used_are_named_before_anything_starts(
    hosts: Hosts, tmp_path: Path
) -> None:
    program = write(tmp_path, "(__import__('pathlib').Path(__file__).parent / 'ran').touch()")
    other = tmp_path / "other"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)],
        check=True,
        capture_output=True,
    )
    keyless = tmp_path / "bin" / "ssh"
    keyless.parent.mkdir()
    config = hosts.key.parent / "ssh_config"
    (tmp_path / "config").write_text(re.sub("IdentityFile.*", "", config.read_text()))
    keyless.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path / "config"} "$@"\n')
    keyless.chmod(0o755)
    without_key = f"{keyless.parent}:{os.environ['PATH']}"
    alike = tmp_path / "python"
    alike.write_text(OTHER_TORCH.format(python=sys.executable))
    alike.chmod(0o755)
    cases: list[tuple[Sequence[object], str, str]] = [
        (
            ("-H", "alpha,nowhere"),
            "",
            r"ssh reaches \(nowhere\), got ssh: Could not resolve .* `ssh nowhere true`",
        ),
        (
            ("-H", "alpha", "-p", 2222),
            "",
            r"\(alpha\), got ssh: .* refused. `ssh -p 2222 alpha true`",
        ),
        (("-H", "alpha", "-i", other), without_key, r"\(alpha\), got .*Permission denied"),
        (
            ("-H", "alpha", "--remote-python", "/no/python"),
            "",
            r"the launcher starts \(alpha\), got .*/no/python",
        ),
        (
            ("-H", "alpha,beta", "--remote-python", alike),
            "",
            r"same version of torch on all hosts.* 2\.0\.1 on beta",
        ),
    ]
    running = []
    for words, path, _ in cases:
        with started(hosts, *words, program, path=path) as process:
            running.append(end(process))
    for (code, out, err), (words, _, pattern) in zip(running, cases, strict=True):
        assert (code, out) == (2, []), (words, err)
        assert re.search(pattern, err.splitlines()[-1]), (words, err)
    assert not (tmp_path / "ran").exists()
    assert run(hosts, "-H", "alpha", "-i", hosts.key, program, path=without_key)[0] == 0
    assert (tmp_path / "ran").exists()


OTHER_TORCH = """#!/bin/sh
[ "$(hostname)" = beta ] && [ "$1" = -m ] || exec {python} "$@"
shift 2
exec {python} -c '
import sys, lockstep.launcher.remote_hosts.host_description as host_description
from lockstep.cli.main import main
known = host_description._version
host_description._version = lambda name: "2.0.1" if name == "torch" else known(name)
sys.exit(main(sys.argv[1:]))' "$@"
"""


def test_a_missing_script_and_a_node_that_does_not_come(hosts: Hosts, tmp_path: Path) -> None:
    code, _, err = run(hosts, "-H", "alpha,beta", "nothing.py", cwd=tmp_path)
    assert (code, "got 'nothing.py'" in err, "(alpha)" in err) == (2, True, True)
    with started(
        hosts, "-q", "-H", "alpha", "--dry-run", "nothing.py", "a b", cwd=tmp_path
    ) as process:
        code, out, _ = end(process)
        assert (code, len(out), out[-1].startswith("ssh -T ")) == (0, 2, True)
        assert out[0].startswith("# with these variables") and "OMP_NUM_THREADS=..." in out[0]
    words = (
        "--nnodes",
        2,
        "--master-addr",
        hosts.gateway,
        "--start-timeout",
        0.5,
        write(tmp_path, ""),
    )
    code, _, err = run(hosts, "--node-rank", 0, *words)
    assert (code, "of 2 nodes, these did not join within 0.5 s: 1" in err) == (1, True)
    code, _, err = run(hosts, "--node-rank", 1, *words)
    assert (code, "--master-addr: expected a host that answers within 0.5 s" in err) == (2, True)
