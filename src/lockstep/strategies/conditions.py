"""What the bits of a run depend on beside its own program: held fixed while it computes, and noted."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .. import environment
from ..communicator import Communicator
from ..errors import ConfigError

__all__ = ["Conditions", "differences"]

# Of torch.compile: each shape is compiled for itself, whichever came before it, and where there are too many of them it
# is an error. By default the second shape makes a program for all, and from the ninth on nothing is compiled any more.
_COMPILING = {"automatic_dynamic_shapes": False, "recompile_limit": 256, "fail_on_recompile_limit_hit": True}


class _Switches(NamedTuple):
    """Settings of the process that change results."""

    threads: int
    deterministic: bool
    warn_only: bool
    fill: bool
    benchmark: bool
    workspace: str | None
    compiling: tuple[Any, ...] | None  # values for `_COMPILING`; None while nothing can have been compiled

    @classmethod
    def now(cls) -> _Switches:
        return cls(
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark,
            environment.cublas_workspace(),
            None if (config := _compiler()) is None else tuple(getattr(config, name) for name in _COMPILING),
        )

    def set(self, before: _Switches) -> None:
        if self.threads != before.threads:
            torch.set_num_threads(self.threads)
        if self.deterministic != before.deterministic:
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = self.benchmark
        environment.set_cublas_workspace(self.workspace)
        if self.compiling is not None:
            for name, value in zip(_COMPILING, self.compiling, strict=True):
                setattr(_compiler(), name, value)


def _compiler() -> Any:
    """The settings of torch.compile, if something has asked for it: to import it takes a second."""
    return sys.modules.get("torch._dynamo.config")


class Conditions:
    """The conditions under which a run with shards computes.

    Within an operation on the CPU, sums are cut by the number of threads; so it is the run's, not the machine's. Of
    operations with several algorithms torch is told to take one with a fixed order, and not to try which is quickest.

    Args:
        device: where the run computes.
        threads: within an operation on the CPU; None is 1 on the CPU, and the process's own on other devices.

    Raises:
        ConfigError: when that is no number of threads.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ConfigError("threads", "a whole number of at least 1", threads)
        self.device = device
        self.threads = 1 if threads is None and device.type == "cpu" else threads

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Hold them; afterwards everything is as it was."""
        before = _Switches.now()
        wanted = _Switches(
            threads=self.threads or before.threads,
            deterministic=True,
            warn_only=before.warn_only,  # a user's wish to be warned alone
            fill=False,  # it is for finding mistakes, and costs a pass over every new tensor
            benchmark=False,
            # cuBLAS sums in a fixed order only with a workspace of fixed size.
            workspace=before.workspace or (":4096:8" if self.device.type == "cuda" else None),
            compiling=before.compiling and tuple(_COMPILING.values()),
        )
        if wanted == before:
            yield
            return
        wanted.set(before)
        try:
            yield
        finally:
            before.set(wanted)

    def describe(self) -> dict[str, Any]:
        """Names and plain values of what is the same for all workers, for a checkpoint."""
        with self.fixed():
            return self._found()

    def _found(self) -> dict[str, Any]:
        found: dict[str, Any] = {"torch": str(torch.__version__), "device": self.device.type, "threads": self.threads}
        if self.device.type == "cuda":
            found |= {"GPU": torch.cuda.get_device_name(self.device), "CUDA": torch.version.cuda}
            found["cuDNN"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
            found["workspace of cuBLAS"] = environment.cublas_workspace()
        else:
            found |= {"instruction set": torch.backends.cpu.get_cpu_capability()}
            found |= {"oneDNN": torch.backends.mkldnn.enabled}
        return found | {"precision of float32 products": torch.get_float32_matmul_precision()}

    def check_same(self, comm: Communicator) -> None:
        """See that all workers compute under the same conditions.

        Raises:
            ConfigError: on every worker, naming the first difference and the rank that has it.
        """
        for rank, theirs in enumerate(every := comm.allgather_object(self.describe())):
            if found := differences(every[0], theirs):
                name, ours, other = found[0]
                hint = "Equal bits need equal machines; choose them, or set the same on each."
                raise ConfigError(
                    "workers", f"the same {name} on all", found=f"{ours} on rank 0, {other} on {rank}", hint=hint
                )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, then, now) of each condition that is another than it was; one that is missing is None."""
    names = dict.fromkeys([*saved, *now])
    return [(name, saved.get(name), now.get(name)) for name in names if saved.get(name) != now.get(name)]
