"""Threads that stay, one for each replica, and the calls that they make at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from ..errors import ConfigError
from .devices import Device, as_devices
from .failure import describe, shapes_of
from .spread import leaves

__all__ = ["Settings", "Threads", "parallel_apply"]

T = TypeVar("T")


class Threads:
    """Threads that wait, idle, for work, and end when nobody holds them any more.

    Operators release the interpreter lock, and the backward pass of a graph on the CPU runs in the thread that calls
    it. So replicas on the CPU compute at the same time when each has a thread of its own. They share the cores evenly:
    torch's count of threads within an operator belongs to the thread that calls it (OpenMP).

    Args:
        count: how many.
        cores: of each, for threads within an operator; the caller's divided by `count` when None.
    """

    def __init__(self, count: int, cores: int | None = None) -> None:
        if count < 1:
            raise ConfigError("count", "at least one thread", count)
        self._cores = max(1, torch.get_num_threads() // count) if cores is None else cores
        self._start(count)

    def _start(self, count: int) -> None:
        self._process = os.getpid()
        self._pools = [ThreadPoolExecutor(1, f"replica-{number}") for number in range(count)]
        here = torch.get_num_threads()
        self.run([partial(_use_cores, self._cores)] * count)
        # What a thread says is taken for threads yet to come, too, such as those of the caller.
        torch.set_num_threads(here)

    def __len__(self) -> int:
        return len(self._pools)

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Call every task in the thread of its number, at the same time; what they return, in order.

        Whatever happens, all have ended when this returns. The first failure by number is raised.
        """
        if os.getpid() != self._process:
            self._start(len(self._pools))  # a fork has none of its parent's threads, and would wait for them for ever
        futures: list[Future[T]] = []
        try:
            for pool, task in zip(self._pools, tasks, strict=False):
                futures.append(pool.submit(task))
            wait(futures)
        finally:
            wait(futures)  # also after Ctrl-C: nothing may go on with tensors that the caller takes back
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads now."""
        for pool in self._pools:
            pool.shutdown()


def _use_cores(count: int) -> None:
    # A thread that has not asked yet takes what was said last, by whomever, when it first computes something.
    torch.get_num_threads()
    torch.set_num_threads(count)


class Settings:
    """Those settings of torch that belong to the calling thread: taken in one, set in another."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = sorted({"cpu", *(device.type for device in devices)} - {"meta"})
        self._casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._streams = {device: _stream(device) for device in devices if device.type not in ("cpu", "meta")}

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Compute under these settings, with `device` as the current one."""
        with ExitStack() as stack:
            if device in self._streams:
                module: Any = torch.get_device_module(device)
                stack.enter_context(module.device(device))
                stack.enter_context(module.stream(self._streams[device]))
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


def _stream(device: torch.device) -> Any:
    module: Any = torch.get_device_module(device)
    return module.current_stream(device)


def parallel_apply(
    functions: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
    threads: Threads | None = None,
) -> list[Any]:
    """Call functions or modules at the same time, each on inputs of its own.

    They run under the caller's settings: gradient and inference mode, autocast, streams. A backward pass runs where it
    is called; for all to run at the same time the functions themselves call it.

    Args:
        functions: one for each device.
        inputs: for each a tuple of arguments; what is no tuple is the only argument.
        kwargs: for each the keyword arguments.
        devices: for each its device; that of the first tensor among its inputs when None.
        threads: kept from call to call; with None some are started for this call alone.

    Returns:
        What they return, in order.

    Raises:
        ConfigError: for lists that differ in length.
        ReplicaError: for the first that fails, with device and shapes.
    """
    keywords = [{} for _ in functions] if kwargs is None else kwargs
    lengths = {"functions": len(functions), "inputs": len(inputs), "kwargs": len(keywords)}
    places = [_device_of((i, k)) for i, k in zip(inputs, keywords, strict=False)] if devices is None else devices
    lengths["devices"] = len(places)
    if len(set(lengths.values())) > 1:
        raise ConfigError("inputs", "as many inputs as functions", found=str(lengths))
    if threads is not None and len(threads) < len(functions):
        raise ConfigError("threads", f"a thread for each of {len(functions)} functions", len(threads))
    targets = as_devices(places)
    settings = Settings(targets)

    def call(number: int) -> Any:
        given = inputs[number] if isinstance(inputs[number], tuple) else (inputs[number],)
        try:
            with settings.on(targets[number]):
                return functions[number](*given, **keywords[number])
        except Exception as error:
            shapes = shapes_of((given, keywords[number]))
            raise describe(error, number, len(functions), targets[number], shapes) from error

    if len(functions) == 1:
        return [call(0)]
    pool = threads or Threads(len(functions))
    try:
        return pool.run([partial(call, number) for number in range(len(functions))])
    finally:
        if threads is None:
            pool.close()


def _device_of(inputs: Any) -> torch.device:
    found = next(iter(leaves(inputs)), None)
    return torch.device("cpu") if found is None else found[1].device
