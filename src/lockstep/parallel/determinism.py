"""Determinism settings: the settings of torch and the host that the bits of a run depend on,
besides its program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .. import arguments, devices, environment
from ..communicator import Communicator
from ..errors import ConfigError

# Settings of torch.compile: compile each shape separately, independent of earlier shapes, and raise
# an error at too many shapes. By default, the second shape makes the program dynamic, and from the
# ninth shape on nothing is compiled.
_COMPILER_SETTINGS = {
    "automatic_dynamic_shapes": False,
    "recompile_limit": 256,
    "fail_on_recompile_limit_hit": True,
}


class _Settings(NamedTuple):
    """Settings of the process that change results."""

    threads: int
    deterministic: bool
    warn_only: bool
    fill: bool
    benchmark: bool
    workspace: str | None
    # values for `_COMPILER_SETTINGS`; None while torch.compile is not imported
    compiler: tuple[Any, ...] | None

    @classmethod
    def current(cls) -> _Settings:
        """Read the settings of this process."""
        return cls(
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark,
            environment.cublas_workspace(),
            None
            if (config := _compiler_config()) is None
            else tuple(getattr(config, n) for n in _COMPILER_SETTINGS),
        )

    def apply(self, previous: _Settings) -> None:
        """Change the settings of this process from `previous` to these."""
        if self.threads != previous.threads:
            torch.set_num_threads(self.threads)
        if self.deterministic != previous.deterministic:
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = self.benchmark
        environment.set_cublas_workspace(self.workspace)
        if self.compiler is not None:
            for name, value in zip(_COMPILER_SETTINGS, self.compiler, strict=True):
                setattr(_compiler_config(), name, value)


def _compiler_config() -> Any:
    """Return torch.compile's configuration module, or None while it is not imported: the import
    takes a second.
    """
    return sys.modules.get("torch._dynamo.config")


class DeterminismSettings:
    """The determinism settings of a run with virtual workers.

    Operations on the CPU split sums by the number of threads, so the run fixes that number, not the
    host. Where an operation has several algorithms, torch uses one with a fixed order of summation
    and does not benchmark them.

    Args:
        device: the device that the run computes on.
        threads: threads within an operation on the CPU; None means 1 on the CPU, and the process's
            current setting on other devices.

    Raises:
        ConfigError: if `threads` is not a whole number of at least 1.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        if threads is not None:
            threads = arguments.whole("threads", threads, least=1)
        self.device = device
        self.threads = 1 if threads is None and device.type == "cpu" else threads

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the settings within a `with` block, and restore the previous ones after it."""
        previous = _Settings.current()
        wanted = _Settings(
            threads=self.threads or previous.threads,
            deterministic=True,
            warn_only=previous.warn_only,  # the user may have asked for warnings instead of errors
            fill=False,  # a debugging aid that costs a pass over every new tensor
            benchmark=False,
            # cuBLAS sums in a fixed order only with a workspace of fixed size.
            workspace=previous.workspace
            or (devices.CUBLAS_WORKSPACE if self.device.type == "cuda" else None),
            compiler=previous.compiler and tuple(_COMPILER_SETTINGS.values()),
        )
        if wanted == previous:
            yield
            return
        wanted.apply(previous)
        try:
            yield
        finally:
            previous.apply(wanted)

    def describe(self) -> dict[str, Any]:
        """Return the settings that must be equal on all workers, by name, as plain values for a
        checkpoint.
        """
        with self.applied():
            settings: dict[str, Any] = {
                "torch": str(torch.__version__),
                "device": self.device.type,
                "threads": self.threads,
            }
            if self.device.type != "cpu":
                settings |= devices.versions_of(self.device)
            if self.device.type == "cuda":
                settings["workspace of cuBLAS"] = environment.cublas_workspace()
            else:
                settings |= {"instruction set": torch.backends.cpu.get_cpu_capability()}
                settings |= {"oneDNN": torch.backends.mkldnn.enabled}
            return settings | {
                "precision of float32 products": torch.get_float32_matmul_precision()
            }

    def check_same(self, comm: Communicator) -> None:
        """Check that all workers have the same settings.

        Raises:
            ConfigError: on every worker, naming the first difference and its rank.
        """
        settings = comm.allgather_object(self.describe())
        for rank, theirs in enumerate(settings):
            if changed := differences(settings[0], theirs):
                name, ours, other = changed[0]
                hint = "Equal bits need equal hosts; choose them, or set the same on each."
                raise ConfigError(
                    "workers",
                    f"the same {name} on all",
                    found=f"{ours} on rank 0, {other} on {rank}",
                    hint=hint,
                )


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, saved value, current value) of each setting that has changed; a missing setting
    is None.
    """
    names = dict.fromkeys([*saved, *current])
    return [
        (name, saved.get(name), current.get(name))
        for name in names
        if saved.get(name) != current.get(name)
    ]
