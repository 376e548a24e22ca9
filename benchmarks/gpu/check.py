"""Sees whether Lockstep works on this host's GPU, and how fast it is: one command of less than nine
minutes.

Runs the tests marked `gpu`, the examples on the GPU, `lockstep doctor`, and the measurements of
this folder, each in a process of its own with a time limit; goes on after a failure. What was found
is in one JSON file and one page.

    make gpu-check                                # PYTHON=... is one whose torch has CUDA
    python benchmarks/gpu/check.py --only tests   # a part once more: the others stay
    python benchmarks/gpu/check.py --device cpu   # with --quick: a smoke run
    python benchmarks/gpu/check.py --write        # also puts the page into docs/gpus.md

It needs torch, pytest and what Lockstep imports; nothing has to be installed, as src is on the
path.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RESULTS = ROOT / "benchmarks" / "results"

# what Lockstep and the tests import, as installed packages are named
NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "typing_extensions": "typing-extensions",
    "cloudpickle": "cloudpickle",
    "rich": "rich",
    "yaml": "PyYAML",
    "matplotlib": "matplotlib",
    "msgspec": "msgspec",
    "setproctitle": "setproctitle",
    "psutil": "psutil",
    "sklearn": "scikit-learn",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: as --only takes it.
        limit: seconds after which it is ended.
        run: does it: (part, setting) → what was found.
    """

    name: str
    limit: float
    run: Callable[[Part, Setting], dict[str, Any]]


@dataclass
class Setting:
    """How the check is run, and where.

    Attributes:
        device: "cuda", or "cpu".
        quick: whether sizes are small.
        folder: for files of the parts.
        until: when the whole check should have ended, of `time.monotonic()`.
    """

    device: str
    quick: bool
    folder: Path
    until: float
    log: list[str] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """The variables of the parts' processes."""
        path = os.pathsep.join(
            str(ROOT / each) for each in ("src", "benchmarks", "benchmarks/gpu", "tests")
        )
        known = os.environ.get("PYTHONPATH")
        given = {
            "PYTHONPATH": f"{path}{os.pathsep}{known}" if known else path,
            "PYTHONUNBUFFERED": "1",
        }
        if self.device == "cuda":
            given["CUBLAS_WORKSPACE_CONFIG"] = (
                ":4096:8"  # before torch 2.10 read once, by the first product
            )
        else:
            given |= {"LOCKSTEP_GPU_TESTS": "cpu", "OMP_NUM_THREADS": "1"}
        return {**os.environ, **given}


@dataclass
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code; None if it was ended at its limit.
        output: what it wrote.
        seconds: how long it took.
    """

    code: int | None
    output: str
    seconds: float

    @property
    def state(self) -> str:
        """In words."""
        if self.code is None:
            return f"ended at its limit of {self.seconds:.0f} s"
        return "passed" if self.code == 0 else f"failed with code {self.code}"

    @property
    def tail(self) -> str:
        """The end of what it wrote."""
        return "\n".join(self.output.strip().splitlines()[-30:])


def run_process(command: Sequence[str], limit: float, setting: Setting) -> Ended:
    """Run a command with a time limit, and end all that it has started."""
    began = time.monotonic()
    limit = max(1.0, min(limit, setting.until - began) - _GRACE_S)
    path = setting.folder / "output"
    with path.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=setting.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            with suppress(subprocess.TimeoutExpired):  # pytest then writes what it has found
                process.send_signal(signal.SIGINT)
                process.wait(_GRACE_S)
        except BaseException:
            _end(process)
            raise
        _end(process)
    return Ended(code, path.read_text(errors="replace"), time.monotonic() - began)


def _end(process: subprocess.Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- The parts
# --------------------------------------------------------------------------------------------------


def doctor(part: Part, setting: Setting) -> dict[str, Any]:
    ended = run_process([sys.executable, "-m", "lockstep", "doctor"], part.limit, setting)
    _, heading, findings = ended.output.partition(
        "What to fix"
    )  # the host is described by `describe_host`
    return {"state": ended.state, "output": (heading + findings).strip() if heading else ended.tail}


def tests(part: Part, setting: Setting) -> dict[str, Any]:
    report = setting.folder / "tests.xml"
    chosen = ["-k", "devices or collectives"] if setting.quick else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-m",
        "gpu",
        "-W",
        "default",
        "--timeout=70",
    ]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, max(1, (os.cpu_count() or 1) // 2)))]
    ended = run_process(
        [*command, f"--junitxml={report}", "-p", "no:cacheprovider", *chosen], part.limit, setting
    )
    found: dict[str, Any] = {"state": ended.state, **read_tests(report)}
    if "tests" not in found or ended.code != 0:
        found["output"] = ended.tail
    return found


def read_tests(report: Path) -> dict[str, Any]:
    """How many tests passed, and the errors of those that failed, from pytest's report."""
    if not report.exists():
        return {}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((each for each in case if each.tag in ("failure", "error")), None)
        skipped = any(each.tag == "skipped" for each in case)
        counts["failed" if problem is not None else "skipped" if skipped else "passed"] += 1
        if problem is not None:
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            failed[name] = (problem.get("message") or "").splitlines()[:1]
    return {"tests": counts, "failed": failed}


def examples_on(device: str) -> list[list[str]]:
    """The programs of the tutorials' subjects, with the device's name where they take one."""
    first = "cuda:0" if device == "cuda" else "cpu"
    script = [sys.executable]
    lockstep_command = [sys.executable, "-m", "lockstep"]
    train = ["train", "--device", device, "--epochs", "2"]
    return [
        [*script, "examples/devices_from_scratch.py", first, first],
        [*script, "examples/devices_resnet18.py", first, "cpu"],
        [*script, "examples/cnn_adam.py", first, first],
        [*script, "examples/gluon_devices.py", "1"],
        [*script, "examples/own_loop.py"],
        [*script, "examples/copy_overlap.py"],
        [*script, "examples/cpu_and_gpu.py"],
        [*lockstep_command, "run", "-np", "1", "examples/ddp.py"],
        [*lockstep_command, *train],
        [*lockstep_command, *train, "--precision", "bf16", "--virtual-workers", "4"],
        [*lockstep_command, *train, "--compile", "--compile-mode", "reduce-overhead"],
    ]


def examples(part: Part, setting: Setting) -> dict[str, Any]:
    found: dict[str, str] = {}
    commands = examples_on(setting.device)
    until = time.monotonic() + part.limit
    for command in commands[:1] if setting.quick else commands:
        if time.monotonic() > min(until, setting.until - _LEAST_S):
            break
        words = [word.replace(sys.executable, "python") for word in command]
        run = (
            [*command, "--run-dir", str(setting.folder / f"run-{len(found)}")]
            if "train" in command
            else command
        )
        ended = run_process(run, part.limit / 2, setting)
        found[" ".join(words)] = (
            ended.state if ended.code == 0 else f"{ended.state}: {ended.tail[-600:]}"
        )
    failed = sum(state != "passed" for state in found.values())
    left = (
        f", {len(commands) - len(found)} not run"
        if len(found) < len(commands) and not setting.quick
        else ""
    )
    return {
        "state": f"failed: {failed} of {len(found)}{left}" if failed else f"passed{left}",
        "examples": found,
    }


def measurement(part: Part, setting: Setting) -> dict[str, Any]:
    """Run the script of the part's name in this folder."""
    path = setting.folder / f"{part.name}.json"
    command = [
        sys.executable,
        str(HERE / f"{part.name}.py"),
        "--device",
        setting.device,
        "--json",
        str(path),
    ]
    ended = run_process([*command, *(["--quick"] if setting.quick else [])], part.limit, setting)
    found = json.loads(path.read_text()) if path.exists() else {}
    notes = [
        line
        for line in ended.output.splitlines()
        if re.match(r"^[\w ,-]+: \w*(Error|Exception)", line)
    ]
    failed = {} if ended.code == 0 else {"output": ended.tail}
    return {
        "state": ended.state,
        "found": found,
        **({"left out": notes} if notes else {}),
        **failed,
    }


PARTS = [
    Part("doctor", 40, doctor),
    Part("tests", 190, tests),
    Part("small_steps", 110, measurement),
    Part("epochs", 150, measurement),
    Part("language_model", 90, measurement),
    Part("examples", 90, examples),
    Part("overheads", 70, measurement),
]
"""The tests come first: figures of a library that is wrong are worth nothing."""

WHOLE = 520.0
_GRACE_S = 8.0  # between the signal that asks a process to end and its end
_LEAST_S = 20.0  # what is left for a part must be more, or it is not begun


# --- What was aimed at
# ------------------------------------------------------------------------------------------------


def _get(found: dict[str, Any], *names: str) -> Any:
    """Return what stands under the names, one within another; None if something is missing."""
    value: Any = found
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True)
class Aim:
    """What a figure should be.

    Attributes:
        text: what is aimed at.
        names: where the figure stands.
        least: whether it should be at least `bound`; else at most.
        bound: the bound.
    """

    text: str
    names: tuple[str, ...]
    least: bool
    bound: float

    def judged(self, parts: dict[str, Any]) -> str:
        """One line of the page."""
        value = _get(parts, *self.names)
        if not isinstance(value, int | float):
            return f"| {self.text} | not measured | |"
        met = value >= self.bound if self.least else value <= self.bound
        return f"| {self.text} | {_number(float(value))} | {'met' if met else 'NOT MET'} |"


_EPOCHS = ("epochs", "found")
_STEPS = ("small_steps", "found")
_GPT = ("language_model", "found")
_TUTORIAL = "tutorial over Trainer"
_BEST = "best of ours over best by hand"
_MORE = "more than by hand"

AIMS = [
    Aim(
        "LeNet: the tutorials' loop takes at least 3 times as long",
        (*_EPOCHS, "LeNet", _TUTORIAL),
        True,
        3,
    ),
    Aim("LeNet: at most 1.02 of the best loop by hand", (*_EPOCHS, "LeNet", _BEST), False, 1.02),
    Aim(
        "ResNet-18: the tutorials' loop takes at least 3 times as long",
        (*_EPOCHS, "ResNet-18", _TUTORIAL),
        True,
        3,
    ),
    Aim(
        "ResNet-18: at most 1.02 of the best loop by hand",
        (*_EPOCHS, "ResNet-18", _BEST),
        False,
        1.02,
    ),
    Aim(
        "LeNet, 32 images: `TrainStep`, us more than by hand: 50",
        (*_STEPS, "LeNet", _MORE, "TrainStep"),
        False,
        50,
    ),
    Aim(
        "LeNet, 32 images: `Trainer`, us more than by hand: 50",
        (*_STEPS, "LeNet", _MORE, "Trainer"),
        False,
        50,
    ),
    Aim(
        "MLP, 32 images: `TrainStep`, us more than by hand: 50",
        (*_STEPS, "MLP", _MORE, "TrainStep"),
        False,
        50,
    ),
    Aim(
        "MLP, 32 images: `Trainer`, us more than by hand: 50",
        (*_STEPS, "MLP", _MORE, "Trainer"),
        False,
        50,
    ),
    Aim(
        "GPT: as many tokens per second as nanoGPT's loop",
        (*_GPT, "Lockstep over nanoGPT"),
        True,
        1.0,
    ),
]


# --- The page
# --------------------------------------------------------------------------------------------------


def page(result: dict[str, Any]) -> str:
    """The result of one card for people."""
    host = result["host"]
    parts = result["parts"]
    lines = [
        f"{host['date']}: {host['device']}; driver {host['driver']}; {host['cores']} cores; "
        f"Python {host['python']}, torch {host['torch']} (CUDA {host['cuda']}).",
        "",
        "| Part | Result | Seconds | Commit |",
        "|---|---|---:|---|",
        *(
            f"| {name} | {_state(part)} | {part['seconds']:.0f} | {part['commit']} |"
            for name, part in parts.items()
        ),
        "",
        "| Aim | Found | |",
        "|---|---:|---|",
        *(aim.judged(parts) for aim in AIMS),
        "",
    ]
    for name, part in parts.items():
        lines += _details(name, part)
    return "\n".join(lines).strip()


def _state(part: dict[str, Any]) -> str:
    counts = part.get("tests")
    return (
        f"{part['state']}: {', '.join(f'{n} {what}' for what, n in counts.items())}"
        if counts
        else part["state"]
    )


def _details(name: str, part: dict[str, Any]) -> list[str]:
    lines = []
    if part.get("found"):
        lines += [f"**{name}**", "", *_listed(part["found"]), ""]
    for failed, text in part.get("failed", {}).items():
        lines.append(f"- {failed}: {' '.join(text)}")
    for command, state in part.get("examples", {}).items():
        if state != "passed":
            lines.append(f"- `{command}`: {state.splitlines()[-1]}")
    lines += [f"- left out: {note}" for note in part.get("left out", [])]
    if part["state"] != "passed" and "output" in part and "tests" not in part:
        lines += ["```text", part["output"], "```"]
    return lines


def _listed(found: Any, depth: int = 0) -> list[str]:
    lines = []
    for name, value in found.items():
        indent = "  " * depth
        if isinstance(value, dict):
            lines += [f"{indent}- {name}:", *_listed(value, depth + 1)]
        else:
            lines.append(f"{indent}- {name}: {_number(value)}")
    return lines


def _number(value: Any) -> str:
    """Return a figure for people: three digits, and no more."""
    if not isinstance(value, float):
        return "none" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def describe_host(device: str) -> dict[str, Any]:
    """The device, its driver and the versions."""
    import torch

    name = "the CPU"
    driver = "none"
    if device == "cuda":
        name = torch.cuda.get_device_name(0)
        asked = (
            subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                capture_output=True,
                text=True,
            )
            if _exists("nvidia-smi")
            else None
        )
        driver = (asked.stdout.strip() or "unknown") if asked is not None else "unknown"
    known = os.environ.get("CHECKED_COMMIT", "")  # where the folder of git is not that of the files
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": name,
        "driver": driver,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        "commit": known or commit.stdout.strip() or "an unknown commit",
    }


def _exists(program: str) -> bool:
    return any(
        Path(folder, program).exists() for folder in os.environ.get("PATH", "").split(os.pathsep)
    )


def missing() -> list[str]:
    """The packages that are needed and not there."""
    return [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]


# --- Running
# --------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes; the figures say nothing")
    parser.add_argument(
        "--only", help="some parts, with commas between: " + ", ".join(part.name for part in PARTS)
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="folder for gpu.json and gpu.md (default: results/)",
    )
    parser.add_argument("--write", action="store_true", help="also put the page into docs/gpus.md")
    args = parser.parse_args()
    names = [part.name for part in PARTS]
    args.parts = names if args.only is None else [name.strip() for name in args.only.split(",")]
    if unknown := [name for name in args.parts if name not in names]:
        parser.error(f"--only: expected some of {', '.join(names)}, got {unknown[0]!r}")
    return args


def main() -> int:
    args = parse()
    if lacking := missing():
        print(
            f"error: missing: {', '.join(lacking)}. Install them: python -m pip install "
            f"{' '.join(lacking)}"
        )
        return 2
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: torch sees no GPU here. `lockstep doctor` says why; --device cpu shows that "
            "the scripts run."
        )
        return 2
    host = describe_host(args.device)
    args.output.mkdir(parents=True, exist_ok=True)
    cards = read(args.output)
    result: dict[str, Any] = {"host": host, "parts": {}}
    if args.only is not None:
        result["parts"] |= parts_before(cards, host)
    cards[host["device"]] = result
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        setting = Setting(args.device, args.quick, Path(folder), time.monotonic() + WHOLE)
        for part in PARTS:
            if part.name not in args.parts:
                continue
            began = time.monotonic()
            try:
                left = setting.until - began
                found = (
                    part.run(part, setting)
                    if left > _LEAST_S
                    else {"state": f"not run: {max(0, left):.0f} s left"}
                )
            except Exception as error:  # the other parts are still worth to be run
                found = {"state": f"failed: {type(error).__name__}: {error}"}
            seconds = round(time.monotonic() - began, 1)
            result["parts"][part.name] = {**found, "seconds": seconds, "commit": host["commit"]}
            print(f"{part.name}: {_state(found)}, {time.monotonic() - began:.0f} s", flush=True)
            write(cards, args.output)
    print(f"\n{page(result)}")
    if args.write:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from common import write_between

        write_between(ROOT / "docs" / "gpus.md", "gpu", pages(cards))
    return (
        0 if all(result["parts"][name]["state"].startswith("passed") for name in args.parts) else 1
    )


Cards = dict[str, dict[str, Any]]
"""Name of a device → what the latest check has found on it."""


def read(folder: Path) -> Cards:
    """What checks have found before; empty if there was none."""
    path = folder / "gpu.json"
    return json.loads(path.read_text()) if path.exists() else {}


def parts_before(cards: Cards, host: dict[str, Any]) -> dict[str, Any]:
    """What an earlier check has found on the same device with the same versions; empty if there is
    none.
    """
    before = cards.get(host["device"])
    if before is None or any(
        before["host"][name] != host[name] for name in ("driver", "python", "torch", "cuda")
    ):
        return {}
    return dict(before["parts"])


def pages(cards: Cards) -> str:
    """The results of all cards for people."""
    return "\n\n".join(page(result) for result in cards.values())


def write(cards: Cards, folder: Path) -> None:
    """Keep what has been found so far: the check may be ended at any time."""
    (folder / "gpu.json").write_text(json.dumps(cards, indent=1) + "\n")
    (folder / "gpu.md").write_text(f"# Lockstep on GPUs\n\n{pages(cards)}\n")


if __name__ == "__main__":
    sys.exit(main())
