"""What the ledger keeps of a start: what the bits depend on, and how the program is run again."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from .. import environment
from ..data.loader import Loader
from ..environment.variable_table import DEBUG, DEBUG_RANK, JOB_KEY, OF_WORKERS, RESUME
from ..parallel.fingerprints import checksum_of, state_entries
from ..parallel.optimizer_parts import hyperparameters_of
from ..training.trainer import Trainer

TRAIN_COMMAND = ("-m", "lockstep", "train")
"""The command of a run of `lockstep train`, whose options are in its run directory."""


class Data(msgspec.Struct, frozen=True):
    """What is known of the training data.

    Attributes:
        type: the class of the data set.
        samples: their number; 0 for an iterable data set.
        loader: the settings of the loader that the order of the samples depends on.
        digests: of some samples at fixed places: place → digest.
    """

    type: str = ""
    samples: int = 0
    loader: dict[str, Any] = {}
    digests: dict[str, str] = {}


class Start(msgspec.Struct, frozen=True):
    """A start of a program that keeps a ledger: a line of `ledger.jsonl`. What is not known is
    empty.

    Attributes:
        time: seconds since the epoch.
        host: the name of rank 0's host.
        command: the arguments of Python that run the program again: a file or `-m` and a module,
            and its own.
        launches: whether the program starts its workers itself, with `lockstep.launch`.
        folder: the folder in which it ran.
        variables: the environment variables, without those of the session, of launchers, and
            secrets.
        withheld: the names of variables that look like secrets, which are not kept.
        program: SHA-256 of the program's main file.
        commit: of git, in the folder of that file; with "-dirty" if files differ from it.
        trainer: how many trainers with a ledger the program has made before.
        fit: how many calls of `fit` of this trainer came before.
        resumed: the checkpoint that it resumed from; "" for a start from the beginning.
        workers: their number.
        threads: of an operation, of each worker.
        device: the type of device.
        cpu: its name.
        versions: of Python, torch and Lockstep.
        settings: of the training: virtual workers, global batch size, seed, precision and those of
            determinism.
        model: the class of the model.
        parameters: their number.
        weights: a checksum of them at the start.
        optimizer: its class.
        hyperparameters: of each parameter group.
        data: what is known of the training data.
    """

    time: float = 0.0
    host: str = ""
    command: list[str] = []
    launches: bool = False
    folder: str = ""
    variables: dict[str, str] = {}
    withheld: list[str] = []
    program: str = ""
    commit: str = ""
    trainer: int = 0
    fit: int = 0
    resumed: str = ""
    workers: int = 0
    threads: int = 0
    device: str = ""
    cpu: str = ""
    versions: dict[str, str] = {}
    settings: dict[str, Any] = {}
    model: str = ""
    parameters: int = 0
    weights: str = ""
    optimizer: str = ""
    hyperparameters: list[dict[str, Any]] = []
    data: Data = Data()

    @property
    def virtual_workers(self) -> int | None:
        """The number of virtual workers; None without."""
        return self.settings.get("virtual_workers")


def start_of(trainer: Trainer, data: Data, place: tuple[int, int] = (0, 0)) -> Start:
    """Return what is known of a start, before its first update; called on rank 0 alone.

    Args:
        trainer: the trainer.
        data: what is known of its data.
        place: how many trainers with a ledger, and how many of its calls of `fit`, came before.
    """
    command, main, launches = _program()
    if not trainer.directory.numbers:
        command = [*TRAIN_COMMAND]
        launches = False
    variables, withheld = kept_variables(environment.variables())
    model = trainer.model
    resumed = trainer.checkpoint_manager.last_path
    weights = ""
    if not trainer.step.strategy.sharded_state:
        weights = f"{int(_checksum_on(trainer.comm.device, [*model.parameters()])):016x}"
    return Start(
        time=time.time(),
        host=platform.node(),
        command=command,
        launches=launches,
        folder=str(Path.cwd()),
        variables=variables,
        withheld=withheld,
        program="" if main is None else hashlib.sha256(main.read_bytes()).hexdigest(),
        commit="" if main is None else _commit(main.parent),
        trainer=place[0],
        fit=place[1],
        resumed="" if resumed is None else str(resumed),
        workers=trainer.comm.size,
        threads=torch.get_num_threads(),
        device=trainer.comm.device.type,
        cpu=_cpu(),
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "lockstep": sys.modules[__name__.partition(".")[0]].__version__,
        },
        settings={
            "virtual_workers": trainer.step.strategy.virtual_workers,
            "global_batch_size": trainer.global_batch_size,
            "seed": trainer.seed,
            "precision": trainer.step.precision.name,
            **trainer.state.determinism_settings(),
        },
        model=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        weights=weights,
        optimizer=type(trainer.optimizer).__name__,
        hyperparameters=[
            {name: _plain(value) for name, value in hyperparameters_of(group).items()}
            for group in trainer.optimizer.param_groups
        ],
        data=data,
    )


def data_of(loader: Loader) -> Data:
    """Return what is known of the data of a loader; it reads samples, before an epoch begins."""
    settings = {
        name: _plain(value) for name, value in loader.settings().items() if value is not None
    }
    digests = {str(place): digest for place, digest in loader.sample_digests().items()}
    return Data(type(loader.dataset).__name__, loader.samples, settings, digests)


def state_checksums(trainer: Trainer) -> list[torch.Tensor]:
    """Return checksums of parameters, buffers, and the tensors of the optimizer's state, each on
    its device.

    If that state is divided among the workers, all of them call this.
    """
    optimizer = trainer.optimizer
    of_optimizer = [
        value
        for entries in state_entries(optimizer)
        for _, value in entries
        if torch.is_tensor(value)
    ]
    device = trainer.comm.device
    shards = trainer.step.strategy.shards
    parts = list(trainer.model.parameters()), list(trainer.model.buffers()), of_optimizer
    checksums = [_checksum_on(device, part) for part in parts]
    return checksums if shards is None else [*checksums[:2], shards.checksum(optimizer)]


def _checksum_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return checksum_of([tensor.to(device, non_blocking=True) for tensor in tensors])


def _program() -> tuple[list[str], Path | None, bool]:
    """Return the arguments of Python that run this program again, its main file, and whether it
    starts its workers.
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    arguments = sys.argv[1:]
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return ["-m", name, *arguments], Path(spec.origin) if spec.origin else None, False
    path = Path(file or sys.argv[0])
    # a notebook, or a program from standard input
    if not path.is_file() or path.name == "ipykernel_launcher.py":
        return [], None, False
    # a function that `launch` has called has no main file
    return [sys.argv[0], *arguments], path, file is None


def _commit(folder: Path) -> str:
    """Return the commit of the working tree that has a folder; "" without one, or without git."""
    words = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, text=True, timeout=2.0, check=True)
        return done.stdout.strip()
    return ""


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a number, a text or a list of them, or else its text."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    return repr(value)


_SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|COOKIE|SESSION|PRIVATE|SIGNATURE|CERT|DSN|CONNECTION_STRING"
)
_WITH_PASSWORD = re.compile(r"://[^/\s]*:[^/\s]*@")
# Of the shell, the terminal and the user, and of launchers, whose workers have others each.
_NOT_OF_THE_PROGRAM = re.compile(
    r"_|PWD|OLDPWD|SHLVL|HOME|USER|LOGNAME|HOSTNAME|MAIL|SHELL|TERM.*|COLUMNS|LINES|DISPLAY|TMPDIR"
    r"|(SSH|XDG|DBUS|TMUX|VTE|LESS|LS|PS\d)(_.*|OPEN|COLORS)?"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|(GLOO|NCCL|TORCHELASTIC|TORCH_NCCL|OMPI|PMI|PMIX|MPI|HYDRA|PRTE|SLURM|SBATCH|HOROVOD|PET|RAY)_.*"
    r"|" + "|".join(variable.name for variable in (*OF_WORKERS, DEBUG, DEBUG_RANK, JOB_KEY, RESUME))
)


def kept_variables(variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that the ledger keeps, and the names of those that look like secrets."""
    of_program = {
        name: value for name, value in variables.items() if not _NOT_OF_THE_PROGRAM.fullmatch(name)
    }
    withheld = [
        name
        for name, value in of_program.items()
        if _SECRET.search(name.upper()) or _WITH_PASSWORD.search(value)
    ]
    kept = {name: of_program[name] for name in of_program if name not in withheld}
    printable = {name: os.fsencode(value).decode(errors="replace") for name, value in kept.items()}
    return printable, withheld


# Of no effect on what a step computes, or not known at every start.
_NOT_COMPARED = (
    "time",
    "host",
    "command",
    "folder",
    "withheld",
    "trainer",
    "fit",
    "resumed",
    "weights",
)


def differences(one: Start, other: Start, ignored: Sequence[str] = ()) -> list[str]:
    """Return in words what differs between two starts, of what is known of both.

    Args:
        one, other: the starts.
        ignored: names of further fields that are not compared.
    """
    left = msgspec.to_builtins(one)
    right = msgspec.to_builtins(other)
    for start in (left, right):
        for name in (*_NOT_COMPARED, *ignored):
            start.pop(name, None)
    texts = []
    if left["data"]["digests"] and right["data"]["digests"]:
        digests = left["data"].pop("digests"), right["data"].pop("digests")
        places = [
            place
            for place in digests[0]
            if digests[0][place] != digests[1].get(place, digests[0][place])
        ]
        if places:
            texts.append(
                f"the content of samples ({', '.join(places[:3])}{', …' * (len(places) > 3)})"
            )
    for name, was, now in _leaves(left, right, ""):
        if name == "program":
            texts.append("the program")
        elif name == "data.samples":
            texts.append(f"data ({was:,} samples, and {now:,})")
        else:
            texts.append(f"{name} ({was!r}, and {now!r})")
    return texts


def _leaves(one: Any, other: Any, path: str) -> list[tuple[str, Any, Any]]:
    """Return (path, value, value) of each leaf that two trees of plain values have otherwise."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = dict.fromkeys([*one, *other])
        start = f"{path}." if path else ""
        return [
            leaf for name in names for leaf in _leaves(one.get(name), other.get(name), start + name)
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            leaf
            for number, pair in enumerate(zip(one, other, strict=True))
            for leaf in _leaves(*pair, f"{path}.{number}")
        ]
    if one == other or not (one or other):
        return []
    return [(path, one, other)]
