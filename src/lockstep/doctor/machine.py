"""This machine: processor, cores, memory, shared memory, limits."""

from __future__ import annotations

import mmap
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from .. import environment
from ..errors import ConfigError
from .report import Problem, Section

__all__ = ["examine_machine", "size"]

INFINIBAND = Path("/sys/class/infiniband")
_SHM = Path("/dev/shm")
_LEAST_SHM = 256 << 20  # containers get 64 MiB, which a few batches of a loader's processes fill
_LEAST_FILES = 1024  # the usual limit: the launcher needs two for each worker in every worker, and loaders some more


def examine_machine() -> Section:
    """What the machine has, and what of it this process may use."""
    section = Section("machine")
    section.add("processor", _processor())
    _add_cores(section)
    _add_memory(section)
    _add_shared_memory(section)
    _add_limits(section)
    return section


def size(count: float) -> str:
    """A number of bytes for people: "63.9 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}".replace(".0 ", " ")
        count /= 1024
    return f"{count:.1f} TiB"


def _processor() -> str:
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _add_cores(section: Section) -> None:
    usable, present = environment.usable_cores(), os.cpu_count() or 1
    text = str(present) if usable == present else f"{usable} usable of {present} (affinity, or the container's quota)"
    section.add("cores", text)
    others = [f"{max(1, usable // n)} for each of {n}" for n in sorted({2, usable} - {1})]
    given = environment.variables().get("OMP_NUM_THREADS")
    set_here = [f"but OMP_NUM_THREADS={given} is set"] if given else []
    section.add("threads", ", ".join([f"{usable} for 1 worker", *others, *set_here]))


def _add_memory(section: Section) -> None:
    found = {
        key: int(kib) << 10 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    }
    if "MemTotal" not in found:
        section.add("memory", size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
        return
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    held = f", the container's limit is {size(int(limit))}" if limit.isdecimal() else ""
    section.add("memory", f"{size(found['MemAvailable'])} free of {size(found['MemTotal'])}{held}")


def _add_shared_memory(section: Section) -> None:
    if sys.platform == "linux":
        works = _memfd_works()
        section.add(
            "memfd", "works" if works else "does not work: shm uses files in /dev/shm instead", good=works or None
        )
    if _SHM.is_dir():
        found = shutil.disk_usage(_SHM)
        section.add("/dev/shm", f"{size(found.free)} free of {size(found.total)}", _small_shm(found.total, found.free))
    text, problem = "64 MiB a group, more from 17 ranks on; LOCKSTEP_SHM_SIZE sets it", None
    try:
        if environment.shm_size():
            text = f"at most {size(environment.shm_size())} a group (LOCKSTEP_SHM_SIZE)"
    except ConfigError as error:
        text, problem = f"{error.got!r} (LOCKSTEP_SHM_SIZE)", Problem(str(error), "Set it right, or unset it.")
    section.add("shm size", text, problem)


def _small_shm(total: int, free: int) -> Problem | None:
    if total < _LEAST_SHM:
        fix = "Start the container with --ipc=host, or with a larger --shm-size, such as --shm-size=2g."
        return Problem(f"/dev/shm has {size(total)} only; loader processes pass batches through it", fix)
    if free < _LEAST_SHM // 4:
        return Problem(
            f"/dev/shm is nearly full ({size(free)} free)", "Remove what programs that crashed have left in it."
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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    problem = None
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        problem = Problem(
            f"a process may open {soft} files only", f"Run `ulimit -n {_LEAST_FILES}` before (at most {hard})."
        )
    section.add("open files", _limit(soft, str), problem)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    problem = None
    if soft != resource.RLIM_INFINITY and INFINIBAND.is_dir():
        fix = (
            "Raise memlock to unlimited in /etc/security/limits.conf, or start the container with --ulimit memlock=-1."
        )
        problem = Problem(f"InfiniBand needs locked memory, of which {_limit(soft, size)} is allowed", fix)
    section.add("locked memory", _limit(soft, size), problem)


def _limit(value: int, spell: Callable[[int], str]) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else spell(value)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
