"""Persistent threads, one for each replica, parallel calls in them, and the error of a failed
replica.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from ... import arguments, devices
from ...errors import ConfigError, LockstepError
from .scatter import Device, as_devices, leaves


class ReplicaError(LockstepError, RuntimeError):
    """The computation on one of several replicas failed; ``__cause__`` is the exception that it
    raised.

    Attributes:
        replica: the number of the replica, from 0.
        device: its device.
    """

    def __init__(self, message: str, replica: int = 0, device: str = "") -> None:
        super().__init__(message, replica, device)
        self.message = message
        self.replica = replica
        self.device = device

    def __str__(self) -> str:
        return self.message


def replica_error(
    error: BaseException, replica: int, replicas: int, device: object, shapes: str
) -> ReplicaError:
    """Return the error of replica `replica` of `replicas`, which was given tensors of `shapes`, see
    `shapes_of`.
    """
    reason = f"{type(error).__name__}: {error}"
    return ReplicaError(
        f"replica {replica} of {replicas} on {device}, given {shapes}: {reason}",
        replica,
        str(device),
    )


def shapes_of(inputs: Any) -> str:
    """Return the shapes and dtypes of all tensors in a tree, as text."""
    shapes = [
        f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for _, tensor in leaves(inputs)
    ]
    return ", ".join(shapes) or "no tensors"


T = TypeVar("T")


class Threads:
    """Persistent threads that wait for work, and end when the object is garbage-collected.

    Operators release the interpreter lock, and a backward pass on the CPU runs in the calling
    thread, so replicas on the CPU compute in parallel if each has its own thread. The threads share
    the cores evenly: torch's number of threads within an operator is a setting of the calling
    thread (OpenMP).

    Args:
        count: number of threads.
        cores: threads within an operator for each of them; the caller's setting divided by `count`
            when None.
    """

    def __init__(self, count: int, cores: int | None = None) -> None:
        count = arguments.whole("count", count, least=1, expected="at least one thread")
        self._cores = max(1, torch.get_num_threads() // count) if cores is None else cores
        self._start(count)

    def _start(self, count: int) -> None:
        self._process = os.getpid()
        self._pools = [ThreadPoolExecutor(1, f"replica-{number}") for number in range(count)]
        previous = torch.get_num_threads()
        self.run([partial(_use_cores, self._cores)] * count)
        # The last setting of any thread is also the default of future threads.
        torch.set_num_threads(previous)

    def __len__(self) -> int:
        return len(self._pools)

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Call each task in the thread of its number, all in parallel; returns their results in
        order.

        All tasks have ended when this returns or raises. If several fail, the error of the lowest
        number is raised.

        Args:
            tasks: functions without arguments, at most one for each thread.
        """
        if os.getpid() != self._process:
            self._start(len(self._pools))  # a forked process has none of its parent's threads
        futures: list[Future[T]] = []
        try:
            for pool, task in zip(self._pools, tasks, strict=False):
                futures.append(pool.submit(task))
            wait(futures)
        finally:
            wait(futures)  # also after Ctrl-C: no task may use tensors after this returns
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads now."""
        for pool in self._pools:
            pool.shutdown()


def _use_cores(count: int) -> None:
    # The first call in a thread initialises its setting to that of the last thread that changed it.
    torch.get_num_threads()
    torch.set_num_threads(count)


class Settings:
    """The thread-local settings of torch, read in the calling thread to be applied in others."""

    def __init__(self, used: Sequence[torch.device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        kinds = sorted({"cpu", *(device.type for device in used)} - {"meta"})
        self._casts = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.is_autocast_enabled(kind)
        ]
        self._streams = {
            device: devices.current_stream(device) for device in used if devices.has_streams(device)
        }

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Apply the settings within a `with` block, with `device` as the current device."""
        with ExitStack() as stack:
            if device in self._streams:
                stack.enter_context(torch.get_device_module(device).device(device))
                stack.enter_context(devices.in_stream(device, self._streams[device]))
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


def parallel_apply(
    functions: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[Device] | None = None,
    threads: Threads | None = None,
) -> list[Any]:
    """Call functions or modules in parallel, each on its own inputs.

    They run under the caller's settings: gradient and inference mode, autocast, streams. A backward
    pass runs in the thread that calls it, so the functions themselves must call it for parallel
    backward passes.

    Args:
        functions: one function for each device.
        inputs: a tuple of arguments for each function; a value that is not a tuple is the only
            argument.
        kwargs: the keyword arguments of each function.
        devices: the device of each function; that of the first tensor among its inputs when None.
        threads: persistent threads; when None, threads are started for this call only.

    Returns:
        The results, in order.

    Raises:
        ConfigError: for lists of different lengths.
        ReplicaError: for the first function that fails, with its device and the shapes of its
            inputs.
    """
    keywords = [{} for _ in functions] if kwargs is None else kwargs
    lengths = {"functions": len(functions), "inputs": len(inputs), "kwargs": len(keywords)}
    chosen = (
        [_device_of((i, k)) for i, k in zip(inputs, keywords, strict=False)]
        if devices is None
        else devices
    )
    lengths["devices"] = len(chosen)
    if len(set(lengths.values())) > 1:
        raise ConfigError("inputs", "as many inputs as functions", found=str(lengths))
    if threads is not None and len(threads) < len(functions):
        raise ConfigError(
            "threads", f"a thread for each of {len(functions)} functions", len(threads)
        )
    targets = as_devices(chosen)
    settings = Settings(targets)

    def call(number: int) -> Any:
        arguments = inputs[number] if isinstance(inputs[number], tuple) else (inputs[number],)
        try:
            with settings.on(targets[number]):
                return functions[number](*arguments, **keywords[number])
        except Exception as error:
            shapes = shapes_of((arguments, keywords[number]))
            raise replica_error(error, number, len(functions), targets[number], shapes) from error

    if len(functions) == 1:
        return [call(0)]
    pool = threads or Threads(len(functions))
    try:
        return pool.run([partial(call, number) for number in range(len(functions))])
    finally:
        if threads is None:
            pool.close()


def _device_of(inputs: Any) -> torch.device:
    """Return the device of the first tensor among `inputs`; the CPU without one."""
    return next((tensor.device for _, tensor in leaves(inputs)), torch.device("cpu"))
