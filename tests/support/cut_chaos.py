"""Elastic jobs whose hosts are cut off from each other in turn, while those that go on end: network namespaces.

Run as a program it tries many seeds: ``python tests/support/cut_chaos.py 20 --first 0``.
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
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import warm_python
from support.elastic_program import write_program
from support.hosts import Network, network
from support.launcher_chaos import Job, Plan

HOSTS, EPOCHS = 3, 3000
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
        meanwhile: what happens `after` seconds: "kill" a host that is not cut off, "end" the training, or "". With
            "win" the winner is killed as soon as another host wants to join again.
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
    """Return the cuts of a seed: two to four, of 4 to 7 s, and during one of them the winner ends or dies."""
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


class CutJob(Job):
    """A job on hosts that are cut off."""

    def __init__(self, net: Network, cuts: list[Cut], shared: bool, folder: Path) -> None:
        super().__init__(Plan(HOSTS, 1, shared, (), "shm"), folder)
        run = folder / "run" if shared else None
        self.program = write_program(folder, EPOCHS, run, virtual_workers=HOSTS)
        self.net, self.cuts = net, cuts
        self.timers: list[threading.Timer] = []
        self.kills_winner = False

    def start_on(self, host: int, *words: object) -> None:
        """Start a launcher on a host."""
        name = self.net.names[host]
        index = len(self.hosts)
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = warm_python.popen(["-c", _INSIDE, name, f"host{host}", "lockstep", *words], self.folder, variables)
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
                return

    def kill_host(self, host: int) -> None:
        """Kill a host, and let the training of the others end with the epoch in progress."""
        self.note(f"--- kill host {host}")
        self.lost.add(host)
        self.kill(self.hosts[host].pid)
        self.enough()

    def link(self, host: int, state: str) -> None:
        """Set a host's network device "up" or "down"."""
        self.note(f"--- link of host {host} {state}")
        subprocess.run(["ip", "-n", self.net.names[host], "link", "set", "eth0", state], check=True)

    def _run(self) -> str:
        first = f"{self.net.address.rpartition('.')[0]}.2"
        words = ("run", "--elastic", f"1:{HOSTS}", "--nnodes", HOSTS, "--master-addr", first, "--master-port", PORT)
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
        """Let the training end, or a host die."""
        running = [host for host in self.running if host != cut.host]
        if cut.meanwhile == "win":
            self.kills_winner = True
        elif cut.meanwhile == "end":
            self.enough()
        elif running:
            self.kill_host(running[cut.which % len(running)])

    def enough(self) -> None:
        """Let the training end with the epoch in progress."""
        self.note("--- enough")
        (self.folder / "enough").touch()

    def check(self) -> str:
        """Return what is wrong."""
        out = "\n".join(self.lines)
        for index, host in enumerate(self.hosts):
            said = "\n".join(line for line in self.lines if f"host {index}: " in line)
            if host.returncode and index not in self.lost and _ENDED not in said:
                return f"host {index} failed with {host.returncode} and no word of the others' end"
        if out.count("fingerprint") > 1:
            return "it has trained again what was complete"
        return ""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without a shared run folder")
    options = parser.parse_args(words)
    wrong = ended = 0
    try:
        for seed in range(options.first, options.first + options.count):
            cuts, begun = cuts_of(seed), time.monotonic()
            with tempfile.TemporaryDirectory(prefix="chaos-") as name, network(HOSTS) as net:
                job = CutJob(net, cuts, not options.alone, Path(name))
                try:
                    problem = job.run()
                except KeyboardInterrupt:
                    problem = "interrupted"
            wrong, ended = wrong + bool(problem), ended + any(_ENDED in line for line in job.lines)
            if problem or options.verbose:
                print(f"seed {seed}: {problem or 'fine'} in {time.monotonic() - begun:.2f} s: {cuts}", flush=True)
            if problem or options.verbose:
                shown = [line for line in job.lines if not re.search(r" step \d+ of ", line)]
                print("\n".join(shown), flush=True)
    finally:
        warm_python.unload()
    print(f"{options.count} jobs, in {ended} of them hosts ended because the others had, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
