"""This host: devices, cores, memory, limits, network, versions, and what `lockstep.init()` would do
here.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import resource
import shutil
import socket
import struct
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import environment
from ..errors import ConfigError
from ..tried_versions import OLDEST_TORCH, release_of
from .findings import Problem, Section

INFINIBAND = Path("/sys/class/infiniband")
_SHM = Path("/dev/shm")
_MIN_SHM = 256 << 20  # containers get 64 MiB, which a few batches of loader processes fill
# the usual limit: the launcher needs two for each worker in every worker, and loaders some more
_MIN_FILES = 1024


def examine_host() -> Section:
    """Examine the share of this host that this process may use, and limits that are too low."""
    section = Section("host")
    _add_cores(section)
    _add_memory(section)
    _add_shared_memory(section)
    _add_limits(section)
    return section


def size(count: float) -> str:
    """Return a number of bytes as text: "63.9 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return (
                f"{count:.0f} {unit}"
                if unit == "B" or count >= 100
                else f"{count:.1f} {unit}".replace(".0 ", " ")
            )
        count /= 1024
    return f"{count:.1f} TiB"


def _add_cores(section: Section) -> None:
    usable = environment.usable_cores()
    present = os.cpu_count() or 1
    text = (
        str(present)
        if usable == present
        else f"{usable} usable of {present} (affinity, or the container's quota)"
    )
    threads = environment.variables().get("OMP_NUM_THREADS")
    section.add("cores", f"{text}; OMP_NUM_THREADS={threads} is set" if threads else text)


def _add_memory(section: Section) -> None:
    import psutil

    memory = psutil.virtual_memory()
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    container = f", the container's limit is {size(int(limit))}" if limit.isdecimal() else ""
    section.add("memory", f"{size(memory.available)} free of {size(memory.total)}{container}")


def _add_shared_memory(section: Section) -> None:
    if sys.platform == "linux" and not _memfd_works():
        section.add("memfd", "does not work: shm uses files in /dev/shm instead")
    if _SHM.is_dir():
        usage = shutil.disk_usage(_SHM)
        section.add(
            "/dev/shm",
            f"{size(usage.free)} free of {size(usage.total)}",
            _small_shm(usage.total, usage.free),
        )


def _small_shm(total: int, free: int) -> Problem | None:
    if total < _MIN_SHM:
        fix = (
            "Start the container with --ipc=host, or with a larger --shm-size, such as "
            "--shm-size=2g."
        )
        return Problem(
            f"/dev/shm has {size(total)} only; loader processes pass batches through it", fix
        )
    if free < _MIN_SHM // 4:
        return Problem(
            f"/dev/shm is nearly full ({size(free)} free)",
            "Remove the files that crashed programs have left in it.",
        )
    return None


def _memfd_works() -> bool:
    try:
        descriptor = os.memfd_create("lockstep-doctor")
    except (OSError, AttributeError):
        return False
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        mmap.mmap(descriptor, mmap.PAGESIZE).close()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _add_limits(section: Section) -> None:
    """Add limits that are too low; others are not worth a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_FILES:
        fix = f"Run `ulimit -n {_MIN_FILES}` before (at most {hard})."
        section.add("open files", str(soft), Problem(f"a process may open {soft} files only", fix))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and INFINIBAND.is_dir():
        fix = (
            "Raise memlock to unlimited in /etc/security/limits.conf, or start the container with "
            "--ulimit memlock=-1."
        )
        problem = Problem(f"InfiniBand needs locked memory, of which {size(soft)} is allowed", fix)
        section.add("locked memory", size(soft), problem)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


_DRIVER = Path("/proc/driver/nvidia/version")


def examine_devices() -> Section:
    """Examine every accelerator, GPUs with their memory and load, and the driver."""
    import torch

    from .. import devices  # which imports it too

    section = Section("devices")
    driver = _driver()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        text, problem = _gpu(torch, index)
        section.add(f"cuda:{index}", text, problem)
    if driver:
        section.add("driver", driver, None if count else _unused(torch, driver))
    kind = devices.accelerator()
    if kind == "mps":
        section.add("mps", "Apple GPU, for one worker")
    elif kind is not None and kind != "cuda":
        for index in range(devices.count(kind)):
            section.add(f"{kind}:{index}", devices.name_of(torch.device(kind, index)))
    if not section.facts:
        section.add("GPU", "none that torch can use; workers compute on the CPU")
    return section


def _gpu(torch: Any, index: int) -> tuple[str, Problem | None]:
    properties = torch.cuda.get_device_properties(index)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        fix = (
            "Look for other programs on it with nvidia-smi, or exclude it with "
            "CUDA_VISIBLE_DEVICES."
        )
        return f"{properties.name}, {reason}", Problem(
            f"cuda:{index} cannot be used: {reason}", fix
        )
    load = ""
    with suppress(Exception):  # it needs NVIDIA's own Python package
        load = f", {torch.cuda.utilization(index)} % busy"
    used = f"{size(total - free)} used of {size(total)}"
    return (
        f"{properties.name}, {used}{load}, capability {properties.major}.{properties.minor}",
        None,
    )


def _driver() -> str:
    try:
        match = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", _DRIVER.read_text())
    except OSError:
        return ""
    return f"NVIDIA {match[1]}" if match else "NVIDIA"


def _unused(torch: Any, driver: str) -> Problem:
    if torch.version.cuda is None:
        fix = "Install a build of torch with CUDA: https://pytorch.org/get-started/locally/"
        return Problem(
            f"there is a GPU ({driver}), but torch {torch.__version__} is built without CUDA", fix
        )
    fix = (
        "Check CUDA_VISIBLE_DEVICES, that nvidia-smi works, and that the driver is new enough for "
        "this CUDA."
    )
    return Problem(
        f"there is a GPU ({driver}), but torch (CUDA {torch.version.cuda}) cannot use it", fix
    )


_OLDEST = {"python": (3, 10), "torch": OLDEST_TORCH}
_PACKAGES = {"torch": "torch", "lockstep": "lockstep-train"}

NAMES = ("python", "torch", "lockstep")
"""The packages whose versions must be the same on all hosts of a job."""


def versions() -> dict[str, str]:
    """Return the versions of Python, and of torch and Lockstep if they are installed."""
    installed = {"python": platform.python_version()}
    for name, package in _PACKAGES.items():
        try:
            installed[name] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def must_match(name: str, text: str) -> str:
    """Return the part of a version that must be the same on all hosts of a job, as the launcher
    compares it: "3.11" of Python 3.11.7, and the whole version of others.
    """
    return ".".join(text.split(".")[:2]) if name == "python" else text


def examine_versions() -> Section:
    """List the versions of Python, torch and Lockstep, and of the libraries that torch is built
    with.
    """
    section = Section("versions")
    for name, text in versions().items():
        section.add(name, text, _too_old(name, text))
    for name, text in _built_with().items():
        section.add(name, text)
    return section


def _too_old(name: str, text: str) -> Problem | None:
    oldest = _OLDEST.get(name)
    if oldest is None or release_of(text) >= oldest:
        return None
    least = ".".join(map(str, oldest))
    return Problem(f"{name} is {text}", f"Install {name} {least} or newer, as Lockstep needs it.")


def _built_with() -> dict[str, str]:
    import torch

    libraries = {}
    if torch.version.cuda is not None:
        libraries["CUDA"] = torch.version.cuda
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        libraries["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return libraries


_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address
# a name in /etc/hosts is resolved in a millisecond; a lost answer of a name server costs 5 s
_SLOW_S = 1.0

_MAX_INTERFACES = 8  # a host with many containers has an interface for each


def examine_network() -> Section:
    """Examine the interfaces that are up, with address and speed, and the host's name, which Gloo
    resolves.
    """
    section = Section("network")
    interfaces = [(name, _describe(name)) for _, name in socket.if_nameindex() if name != "lo"]
    for name, text in [(name, text) for name, text in interfaces if text][:_MAX_INTERFACES]:
        section.add(name, text)
    _add_name(section)
    return section


def _describe(name: str) -> str:
    folder = Path("/sys/class/net", name)
    address = _address(name)
    if not address or _first_line(folder / "operstate") == "down":
        return ""
    speed = _first_line(folder / "speed")
    return address + (f", {int(speed) / 1000:g} Gb/s" if speed.isdecimal() else "")


def _address(name: str) -> str:
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _add_name(section: Section) -> None:
    name = socket.gethostname()
    begin = time.monotonic()
    fix = (
        f"Add a line with this host's address and {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME "
        "to an interface."
    )
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except (OSError, UnicodeError):
        section.add(
            "name",
            f"{name} (unknown here)",
            Problem(f"this host cannot resolve its own name, {name}", fix),
        )
        return
    seconds = time.monotonic() - begin
    slow = (
        Problem(f"resolving this host's own name, {name}, takes {seconds:.1f} s", fix)
        if seconds > _SLOW_S
        else None
    )
    section.add("name", f"{name} is {address}", slow)


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def examine_job() -> Section:
    """Examine the launcher in the environment, this process's position in the job, and the workers'
    rendezvous.
    """
    section = Section("job")
    try:
        world = environment.find_world()
        if not environment.is_launched():
            section.add("launcher", "none: init() creates a job of one worker")
            return section
        section.add("launcher", world.source)
        ranks = (
            f"rank {world.rank} of {world.world_size}, local rank {world.local_rank} of "
            f"{world.local_world_size}"
        )
        section.add("position", f"{ranks}, node {world.node} of {world.nodes}")
        section.add("rendezvous", _rendezvous())
    except ConfigError as error:
        section.add(
            "launcher",
            "init() would raise an error",
            Problem(str(error), error.hint or "Correct it."),
        )
    return section


def _rendezvous() -> str:
    from .. import bootstrap

    variables = environment.variables()
    rendezvous = bootstrap.find_rendezvous(environment.find_world(variables), variables)
    if rendezvous.kind == "address":
        return (
            f"at MASTER_ADDR and MASTER_PORT: {variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        )
    return {
        "tcp": f"at {rendezvous.host}:{rendezvous.port}, the first node of the step",
        "local": "on this host, at a port that rank 0 publishes",
        "mpi": "over MPI",
    }[rendezvous.kind]
