"""Starts the ranks that measure a network, and shows what they have found as a table and a
picture.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from .. import environment, messages
from ..environment import variable_table
from ..errors import LockstepError
from ..system import atomic_files
from .measurement import NOISE_LIMIT, CollectiveCurve, NetworkMeasurement, from_json, to_json
from .network_ranks import PROGRESS, RESULT, Settings

_RANKS = "lockstep.planning.network_ranks"


def bench(
    start: Sequence[str],
    workers: int,
    on_this_host: bool,
    seconds: float,
    progress: Callable[[str], None],
) -> NetworkMeasurement:
    """Measure the network between ranks.

    Args:
        start: options of ``lockstep run`` for them, such as ``-np 4``.
        workers: their number.
        on_this_host: whether all are on this host, so that mpiexec can start them, too.
        seconds: that the measurement may take.
        progress: called with what is being measured.

    Raises:
        LockstepError: the ranks failed; their own output says why.
    """
    transports = _transports()
    mpiexec = _mpiexec() if on_this_host else None
    each_s = seconds / (len(transports) + (mpiexec is not None))
    run = [
        sys.executable,
        "-m",
        "lockstep",
        "run",
        "--no-watchdog",
        "--no-prefix",
        "--quiet",
        *start,
        "-m",
        _RANKS,
    ]
    network = _run([*run, _settings(each_s * len(transports), transports)], progress)
    if mpiexec is not None:
        over_mpi = [
            mpiexec,
            *_mpiexec_options(mpiexec),
            "-n",
            str(workers),
            sys.executable,
            "-m",
            _RANKS,
        ]
        try:
            also = _run([*over_mpi, _settings(each_s, ("mpi4py",))], progress)
        except LockstepError as error:
            progress(f"mpi4py is left out: {error}")
        else:
            network = msgspec.structs.replace(
                network, transports={**network.transports, **also.transports}
            )
    return network


def _settings(seconds: float, transports: tuple[str, ...]) -> str:
    return messages.encode(Settings(seconds, transports))


def _transports() -> tuple[str, ...]:
    import torch

    transports = ["shm"] if sys.platform == "linux" else []
    transports.append("gloo")
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        transports.append("nccl")
    return tuple(transports)


def _mpiexec() -> str | None:
    """Return the mpiexec beside this Python, or else the one on the PATH; None without one, or
    without mpi4py.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def _mpiexec_options(mpiexec: str) -> list[str]:
    """Return the options with which Open MPI starts more ranks than cores, also as root; others
    need none.
    """
    version = subprocess.run(
        [mpiexec, "--version"], capture_output=True, text=True, check=False
    ).stdout
    return (
        ["--oversubscribe", "--allow-run-as-root"]
        if "Open MPI" in version or "OpenRTE" in version
        else []
    )


def _run(command: Sequence[str], progress: Callable[[str], None]) -> NetworkMeasurement:
    variables = {**environment.variables(), variable_table.PROGRESS.name: "off"}
    result = ""
    rest = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(PROGRESS):
                progress(line.removeprefix(PROGRESS).strip())
            elif line.startswith(RESULT):
                result = line.removeprefix(RESULT)
            elif line.strip():
                rest.append(line.strip())
    if not result:
        errors = [line for line in rest if "error" in line.lower()] or rest[-1:]
        told = errors[0] if errors else f"exit code {process.returncode}"
        raise LockstepError(f"the ranks that measure have failed: {told}")
    return from_json(result, "the result of the ranks")


def table(network: NetworkMeasurement) -> Iterator[tuple[str, ...]]:
    """Yield the heading and the rows of a table, one row for each transport's collectives and
    pairs.

    The columns: the time of the smallest message; the bandwidth among the largest; how many times
    longer the largest takes while the ranks compute; how much medians differ among parts of the
    measurement; the largest deviation from the fitted curve.
    """
    yield "transport", "operation", "latency", "GB/s", "computing", "noise", "fit"
    for transport, measured in network.transports.items():
        for name, curve in measured.collectives.items():
            yield (transport, name, *_columns(curve))
        for pair in measured.pairs:
            as_curve = CollectiveCurve(pair.idle, pair.noise)
            yield (transport, f"message {pair.ranks[0]} - {pair.ranks[1]}", *_columns(as_curve))


def _columns(curve: CollectiveCurve) -> tuple[str, ...]:
    beside = curve.computing
    slower = "" if beside is None else f"{beside.seconds[-1] / curve.idle.seconds[-1]:.1f} x"
    bandwidth = "" if math.isinf(curve.idle.bandwidth) else f"{curve.idle.bandwidth / 1e9:.2f}"
    noise = f"{100 * curve.noise:.0f} %" + " !" * (curve.noise > NOISE_LIMIT)
    return (
        f"{1e6 * curve.idle.latency:.0f} us",
        bandwidth,
        slower,
        noise,
        f"{100 * curve.idle.residual:.0f} %",
    )


def verdict(network: NetworkMeasurement) -> str:
    """Return in words which measurements are results."""
    if network.is_result:
        return (
            f"Parts of the measurement agree within {100 * network.noise:.0f} % (the quartiles of "
            "their medians)."
        )
    noises = {name: transport.noise for name, transport in network.transports.items()} | {
        "copies in memory": network.copy_noise
    }
    noisy = ", ".join(
        f"{name} ({100 * noise:.0f} %)" for name, noise in noises.items() if noise > NOISE_LIMIT
    )
    others = ", ".join(name for name, noise in noises.items() if noise <= NOISE_LIMIT)
    rest = f" What was measured of {others} is a result." if others else ""
    return (
        f"Not a result: {noisy}. Parts of these measurements differ by so much (the quartiles of "
        f"their medians); expected at most {100 * NOISE_LIMIT:.0f} %. Something else uses these "
        "hosts or the network; measure again when they are idle, or longer with "
        f"--seconds.{rest}"
    )


def draw(network: NetworkMeasurement, path: Path) -> None:
    """Write a picture (PNG) of all curves.

    Raises:
        OSError: it could not be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [
        name for name in next(iter(network.transports.values())).collectives if name != "barrier"
    ]
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3, sharex=True, sharey=True).flat
    for axis, name in zip(axes, [*names, "message"], strict=False):
        for number, (transport, measured) in enumerate(network.transports.items()):
            colour = f"C{number}"
            if name == "message":
                for i, pair in enumerate(measured.pairs):
                    sizes = pair.idle.sizes
                    seconds = pair.idle.seconds
                    axis.plot(
                        sizes,
                        _us(seconds),
                        color=colour,
                        marker=".",
                        lw=1,
                        label=None if i else transport,
                    )
                continue
            curve = measured.collectives[name]
            axis.plot(
                curve.idle.sizes, _us(curve.idle.seconds), color=colour, marker=".", label=transport
            )
            if curve.computing is not None:
                axis.plot(
                    curve.computing.sizes,
                    _us(curve.computing.seconds),
                    color=colour,
                    ls=":",
                    marker=".",
                )
        axis.set(xscale="log", yscale="log", title=name.replace("_", "-"))
        axis.grid(alpha=0.3)
    for axis in figure.axes[3:]:
        axis.set_xlabel("bytes of one rank")
    for axis in figure.axes[::3]:
        axis.set_ylabel("microseconds")
    figure.axes[0].legend(title="dotted: while computing", fontsize="small", title_fontsize="small")
    noisy = ", ".join(
        f"{name}: {100 * transport.noise:.0f} %"
        for name, transport in network.transports.items()
        if not transport.is_result
    )
    warning = f" - NOT A RESULT: noise of {noisy}" if noisy else ""
    hosts = len(network.hosts)
    figure.suptitle(
        f"{network.workers} ranks on {hosts} host{'s'[: hosts != 1]}{warning}", fontsize=11
    )
    with atomic_files.file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def _us(seconds: Sequence[float]) -> list[float]:
    return [1e6 * value for value in seconds]


def write(network: NetworkMeasurement, path: Path, with_picture: bool) -> list[Path]:
    """Write network.json, and the picture next to it if `with_picture`; return the paths.

    Raises:
        LockstepError: a file cannot be written.
    """
    picture = path.with_suffix(".png")
    try:
        if with_picture:
            draw(network, picture)
        atomic_files.write_text(path, to_json(network))
    except OSError as error:
        raise LockstepError(f"{path}: cannot be written: {error.strerror or error}") from None
    return [path, picture] if with_picture else [path]
