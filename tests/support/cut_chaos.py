"""Elastic jobs whose hosts are cut off from each other in turn, while others end, are lost or join:
network namespaces.

Run as a program it tries many seeds: ``python tests/support/cut_chaos.py 20 --first 0``. With
``--losses`` the job goes on through all cuts, while workers and hosts are lost and hosts join, and
must give the bits of an undisturbed one.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import warm_python
from support.elastic_program import fingerprint, rows, write_program
from support.hosts import Network, network
from support.launcher_chaos import Job, Plan

HOSTS, EPOCHS = 3, 3000
MOST_JOIN = 2
PORT = 4711
LIMIT_S = 75.0  # for a job to end when the last cut is over
_ENDED = "the other hosts have ended while"

# The launcher of a host, in its network and with its name.
_INSIDE = """
import ctypes, os, runpy, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
with open(f"/run/netns/{sys.argv[1]}") as namespace:
    assert libc.setns(namespace.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())
assert libc.unshare(0x04000000) == 0, os.strerror(ctypes.get_errno())
socket.sethostname(sys.argv[2])
sys.argv = sys.argv[3:]
runpy._run_module_as_main("lockstep")
"""


@dataclass(frozen=True)
class Cut:
    """A cut of one host from all others, which lasts `seconds`.

    Attributes:
        host: that is cut off.
        seconds: for how long.
        overlap: seconds before its end at which the next one begins.
        meanwhile: what happens `after` seconds: "kill" a host that is not cut off and "end" the
            training, "end" it, or "". With "win" the winner is killed as soon as another host wants
            to join again. "lose" kills a host that is not cut off, "worker" a worker of one, "stop"
            stops a launcher for some seconds, "join" adds a host, and "lose and join" both at once;
            the training goes on.
        which: of the hosts that are not cut off.
        after: seconds after its beginning.
    """

    host: int
    seconds: float
    overlap: float
    meanwhile: str
    which: int
    after: float


def cuts_of(seed: int) -> list[Cut]:
    """Return the cuts of a seed: two to four, of 4 to 7 s, and during one of them the winner ends
    or dies.
    """
    draw = random.Random(seed)
    count = draw.randrange(2, 5)
    fatal = draw.randrange(count)
    return [
        Cut(
            draw.randrange(HOSTS),
            draw.uniform(4.0, 7.0),
            draw.uniform(-1.0, 2.0),
            draw.choice(["kill", "end", "win", "win"]) if index == fatal else "",
            draw.randrange(HOSTS - 1),
            draw.uniform(0.5, 6.0),
        )
        for index in range(count)
    ]


def cuts_with_losses_of(seed: int) -> list[Cut]:
    """Return the cuts of a seed: two to five, of 2 to 10 s, in which workers and hosts are lost, or
    join.
    """
    draw = random.Random(seed)
    cuts = []
    for _ in range(draw.randrange(2, 6)):
        seconds = draw.uniform(2.0, 10.0)
        what = draw.choice(["", "worker", "worker", "stop", "lose", "join", "lose and join"])
        overlap, after = draw.uniform(-4.0, 2.0), draw.uniform(0.0, seconds + 1.0)
        cuts.append(Cut(draw.randrange(HOSTS), seconds, overlap, what, draw.randrange(9), after))
    return cuts


class CutJob(Job):
    """A job on hosts that are cut off."""

    def __init__(self, net: Network, cuts: list[Cut], shared: bool, folder: Path) -> None:
        super().__init__(Plan(HOSTS, 1, shared, (), "shm"), folder)
        run = folder / "run" if shared else None
        self.program = write_program(folder, EPOCHS, run, virtual_workers=HOSTS + MOST_JOIN)
        self.net, self.cuts = net, cuts
        self.timers: list[threading.Timer] = []
        self.kills_winner = False

    def start_on(self, host: int, *words: object) -> None:
        """Start a launcher on a host."""
        name = self.net.names[host]
        index = len(self.hosts)
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = warm_python.popen(
            ["-c", _INSIDE, name, f"host{host}", "lockstep", *words], self.folder, variables
        )
        self.hosts.append(process)
        for stream in (process.stdout, process.stderr):
            thread = threading.Thread(target=self.read, args=(index, stream), daemon=True)
            thread.start()
            self.readers.append(thread)

    def read(self, index: int, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self.note(f"host {index}: {line.rstrip()}")
            if "which joins them again" in line and self.kills_winner:
                self.kill_winner()

    def kill_winner(self) -> None:
        """Kill the host that goes on, if there is one."""
        for host in self.running:
            said = [line for line in list(self.lines) if f"host {host}: lockstep: " in line]
            if not (said and re.search("paused|joins them again", said[-1])):
                self.kills_winner = False
                self.kill_host(host)
                self.enough()
                return

    def kill_host(self, host: int) -> None:
        """Kill a host."""
        self.note(f"--- kill host {host}")
        self.lost.add(host)
        self.kill(self.hosts[host].pid)

    def link(self, host: int, state: str) -> None:
        """Set a host's network device "up" or "down"."""
        self.note(f"--- link of host {host} {state}")
        subprocess.run(["ip", "-n", self.net.names[host], "link", "set", "eth0", state], check=True)

    def _run(self) -> str:
        first = f"{self.net.address.rpartition('.')[0]}.2"
        most = HOSTS + MOST_JOIN
        words = (
            "run",
            "--elastic",
            f"1:{most}",
            "--nnodes",
            HOSTS,
            "--master-addr",
            first,
            "--master-port",
            PORT,
        )
        for node in range(HOSTS):
            self.start_on(node, *words, "-np", 1, "--node-rank", node, self.program)
        begun = time.monotonic()
        while self.steps < 4:
            time.sleep(0.01)
            if time.monotonic() - begun > LIMIT_S or not self.running:
                return "it does not begin"
        at = 0.0
        for cut in self.cuts:
            self.later(at, self.link, cut.host, "down")
            self.later(at + cut.seconds, self.link, cut.host, "up")
            if cut.meanwhile:
                self.later(at + cut.after, self.meanwhile, cut)
            at += cut.seconds - cut.overlap
        end = max(timer.interval for timer in self.timers)
        self.later(end, self.enough)
        deadline = time.monotonic() + end + LIMIT_S
        while self.running:
            time.sleep(0.02)
            if time.monotonic() > deadline:
                for index in self.running:
                    for process in psutil.Process(self.hosts[index].pid).children(recursive=True):
                        self.note(f"    {index} {process.pid} {process.name()}")
                return f"it hangs: {[self.hosts[index].pid for index in self.running]} run"
        for thread in self.readers:
            thread.join(5.0)
        return self.check()

    def run(self) -> str:
        try:
            return super().run()
        finally:
            for timer in self.timers:
                timer.cancel()
                timer.join()

    def later(self, seconds: float, call: object, *args: object) -> None:
        """Call something after so many seconds."""
        timer = threading.Timer(seconds, call, args)  # type: ignore[arg-type]
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def meanwhile(self, cut: Cut) -> None:
        """Let the training end, a host or a worker be lost, or a host join."""
        running = [host for host in self.running if host != cut.host]
        if cut.meanwhile == "win":
            self.kills_winner = True
        elif cut.meanwhile == "end":
            self.enough()
        elif running:
            self.disturb(cut, running[cut.which % len(running)])

    def disturb(self, cut: Cut, host: int) -> None:
        """Let a host, or one of its workers, be lost, or stop its launcher; or let another host
        join beside it.
        """
        pid = self.hosts[host].pid
        if "join" in cut.meanwhile and len(self.hosts) < HOSTS + MOST_JOIN:
            self.note(f"--- join by host {host}")
            for answer in self.ask(pid, "address"):
                self.start_on(len(self.hosts), "join", answer.split()[-1], "-np", 1)
        if "lose" in cut.meanwhile or cut.meanwhile == "kill":
            self.kill_host(host)
        if cut.meanwhile == "kill":
            self.enough()
        with suppress(psutil.NoSuchProcess):
            if cut.meanwhile == "worker":
                self.note(f"--- kill a worker of host {host}")
                self.kill_workers(psutil.Process(pid), 1)
            elif cut.meanwhile == "stop":
                self.note(f"--- stop the launcher of host {host}")
                psutil.Process(pid).suspend()
                self.later(1.0 + cut.which, self.resume, pid)

    def enough(self) -> None:
        """Let the training end with the epoch in progress."""
        self.note("--- enough")
        (self.folder / "enough").touch()

    def check(self) -> str:
        """Return what is wrong."""
        out = "\n".join(self.lines)
        for index, host in enumerate(self.hosts):
            said = "\n".join(line for line in self.lines if f"host {index}: " in line)
            if (
                host.returncode
                and index not in self.lost
                and not (_ENDED in said or self.may_fail(index))
            ):
                return f"host {index} failed with {host.returncode} and no word of the others' end"
        if out.count("fingerprint") > 1:
            return "it has trained again what was complete"
        return self.check_result(out) if "fingerprint" in out else ""

    def check_result(self, out: str) -> str:
        """Return how the result differs from that of one worker alone."""
        epochs, bits = fingerprint(out)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run = folder / "run"
            program = write_program(folder, int(epochs), run, virtual_workers=HOSTS + MOST_JOIN)
            program.write_text(program.read_text().replace("time.sleep(0.02)", ""))
            done = warm_python.run(
                [program], folder, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300.0
            )
            if fingerprint(done.stdout) != (epochs, bits):
                return f"another fingerprint after {epochs} epochs: {bits}"
            if self.plan.shared and rows(self.folder / "run") != rows(run):
                return "other rows in metrics.csv"
        return ""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without a shared run folder")
    parser.add_argument(
        "--losses", action="store_true", help="losses and joins, through which the job goes on"
    )
    options = parser.parse_args(words)
    wrong = ended = completed = 0
    try:
        for seed in range(options.first, options.first + options.count):
            begun, cuts = (
                time.monotonic(),
                (cuts_with_losses_of if options.losses else cuts_of)(seed),
            )
            with (
                tempfile.TemporaryDirectory(prefix="chaos-") as name,
                network(HOSTS + MOST_JOIN) as net,
            ):
                job = CutJob(net, cuts, not options.alone, Path(name))
                try:
                    problem = job.run()
                except KeyboardInterrupt:
                    problem = "interrupted"
            wrong, ended = wrong + bool(problem), ended + any(_ENDED in line for line in job.lines)
            completed += any("fingerprint" in line for line in job.lines)
            if problem or options.verbose:
                print(
                    f"seed {seed}: {problem or 'fine'} in {time.monotonic() - begun:.2f} s: {cuts}",
                    flush=True,
                )
            if problem or options.verbose:
                shown = [line for line in job.lines if not re.search(r" step \d+ of ", line)]
                print("\n".join(shown), flush=True)
    finally:
        warm_python.unload()
    print(
        f"{options.count} jobs, {completed} completed, in {ended} of them hosts ended because the "
        f"others had, {wrong} wrong"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
