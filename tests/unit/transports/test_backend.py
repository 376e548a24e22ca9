"""The backends are known as soon as Lockstep and torch.distributed are both imported, in either
order.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

# In place of torch: what is registered is noted, and nothing takes seconds to import.
STUB = """
import sys
calls = []
if FAILS and not hasattr(sys, "tried"):
    sys.tried = True
    raise ImportError("not this time")
class Backend:
    @classmethod
    def register_backend(cls, name, function, extended_api=False, devices=None):
        calls.append((name, extended_api, devices))
        setattr(cls, name.upper(), name)
def register_rendezvous_handler(scheme, handler):
    calls.append(scheme)
"""
KNOWN = """
from torch.distributed import distributed_c10d as c10d
assert c10d.calls == [("shm", True, ["cpu"]), ("mpi4py", True, ["cpu"]), "mpi4py"], c10d.calls
assert not any(type(finder).__module__.startswith("lockstep") for finder in sys.meta_path), sys.meta_path
"""


def run(folder: Path, program: str, fails: bool = False) -> None:
    """Run the program in a fresh interpreter, in which torch is the stub."""
    package = folder / "torch" / "distributed"
    package.mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "distributed_c10d.py").write_text(f"FAILS = {fails}\n{STUB}")
    source = Path(lockstep.__file__).parents[1]
    start = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(source)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", start + program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "imports",
    [
        "import lockstep\nassert not any(name.startswith('torch') for name in sys.modules)",
        "import torch.distributed.distributed_c10d\nimport lockstep",
        "import torch\nimport lockstep",
    ],
    ids=["lockstep first", "torch first", "torch first but not its distributed part"],
)
def test_either_order(tmp_path: Path, imports: str) -> None:
    run(tmp_path, f"{imports}\n{KNOWN}")


@pytest.mark.parametrize("before", ["", "import torch.distributed.distributed_c10d"])
def test_twice(tmp_path: Path, before: str) -> None:
    again = "import importlib, lockstep\nimportlib.reload(lockstep)\nlockstep.register()\n"
    run(tmp_path, f"{before}\n{again}{KNOWN}{again}{KNOWN}")


FINDER = """
import importlib.abc, importlib.machinery
class Loader(importlib.machinery.SourceFileLoader):
    __slots__ = ()
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith("torch"):
            return None
        asked.append(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = Loader(name, spec.origin)
        return spec
asked = []
"""


@pytest.mark.parametrize(("first", "place"), [("lockstep", 1), ("finder", 0)])
def test_another_finder_is_there_too(tmp_path: Path, first: str, place: int) -> None:
    """It finds the module for Lockstep's, and its loader is what others see of it."""
    steps = ["import lockstep\n", f"sys.meta_path.insert({place}, Finder())\n"]
    check = "assert c10d.__name__ in asked\nassert isinstance(c10d.__spec__.loader, Loader)\n"
    check += "import inspect\nassert 'class Backend' in inspect.getsource(c10d)\n"
    run(
        tmp_path,
        FINDER + "".join(steps if first == "lockstep" else reversed(steps)) + KNOWN + check,
    )


def test_somebody_looks_for_the_module_without_importing_it(tmp_path: Path) -> None:
    look = (
        "import importlib.util\nassert "
        "importlib.util.find_spec('torch.distributed.distributed_c10d')\n"
    )
    run(tmp_path, f"import lockstep\n{look}{look}{KNOWN}")


def test_the_first_import_fails(tmp_path: Path) -> None:
    attempt = (
        "try:\n    import torch.distributed.distributed_c10d\nexcept ImportError:\n    failed = "
        "True\n"
    )
    run(tmp_path, f"import lockstep\n{attempt}assert failed\n{KNOWN}", fails=True)


def test_a_torch_without_a_distributed_part(tmp_path: Path) -> None:
    gone = "import torch.distributed as d\nimport pathlib\n"
    gone += "pathlib.Path(d.__path__[0], 'distributed_c10d.py').write_text('')\nimport importlib\n"
    gone += "importlib.import_module('torch.distributed.distributed_c10d')\n"
    run(tmp_path, f"import lockstep\n{gone}")
    run(tmp_path / "other", f"{gone}import lockstep\n")


REAL = """
import sys
import lockstep
assert "torch" not in sys.modules
import torch.distributed as dist
for name in ("shm", "mpi4py"):
    assert getattr(dist.Backend, name.upper()) == name
    assert dist.Backend.backend_capability[name] == ["cpu"]
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
dist.destroy_process_group()
"""


def test_with_torch_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REAL], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
