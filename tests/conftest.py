"""Fixtures for all tests: nothing leaks, and several ranks are cheap."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager

# torch.compile would otherwise keep a pool of compiler processes for the rest of the run
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# it would compile test programs and headers for half a minute first
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
# torch asks for the name of every address that its stores connect to, and glibc waits 5 s for a
# lost answer
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# pytest-xdist would write the names of its processes over the variables that /proc shows
os.environ.setdefault("SPT_NOENV", "1")
# what a command writes while it starts would depend on how busy the host is
os.environ["LOCKSTEP_PROGRESS"] = "off"

# without bytecode each of hundreds of processes would compile the package anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import pytest
import torch

from support import gpu, leaks, warm_python
from support.pool import Pool
from support.worker import fresh_store

POOLS = pytest.StashKey[list[Pool]]()
FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[POOLS] = []
    config.addinivalue_line("markers", "gpu: the test needs a GPU, see support.gpu")
    config.addinivalue_line(
        "markers", "leaks(reason): the test may leave resources or settings behind"
    )
    # how long an example takes depends on what else the host does
    hypothesis.settings.register_profile("any host", deadline=None)
    hypothesis.settings.load_profile("any host")
    sys.dont_write_bytecode = False  # nor do processes that multiprocessing starts
    torch.set_num_threads(1)
    # a job in the background begins with Ctrl-C ignored, and so would every program that a test
    # starts
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # torch keeps two descriptors from its first store on; no test shall seem to leak them
    fresh_store()


# Files that take a minute or more, which begin first where several processes run the tests: the
# longest first, so that none of them is left when the others are done.
LONGEST = (
    "test_faults.py",
    "test_examples.py",
    "test_job_schedules.py",
    "test_elastic.py",
    "test_verified_programs.py",
    "test_desyncs.py",
    "test_run_hosts.py",
    "test_equal_bits.py",
    "test_collectives.py",
    "test_run.py",
    "test_testing.py",
    "test_election.py",
    "test_launchers.py",
    "test_proof.py",
    "test_limits.py",
    "test_transcripts.py",
    "test_horovodrun.py",
    "test_resume_commands.py",
    "test_shm_endings.py",
    "test_horovod_scripts.py",
    "test_launch.py",
    "test_hang_up.py",
    "test_properties.py",
    "test_mpi.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is not None and not gpu.can_run():
            item.add_marker(pytest.mark.skip("needs a GPU"))
    items.sort(
        key=lambda item: LONGEST.index(item.path.name)
        if item.path.name in LONGEST
        else len(LONGEST)
    )


def pytest_collection_finish() -> None:
    # thousands of tests and what they import, which each collection after a test would go through
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note how the run ended: `.ci/run` runs failed tests again only if the run itself was
    complete.
    """
    cache = getattr(session.config, "cache", None)  # none with -p no:cacheprovider
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set("lockstep/exit_status", int(exitstatus))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """A process with PyTorch loaded, of which the programs of `support.warm_python` are forks."""
    warm_python.load()
    yield
    warm_python.unload()


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """Warm worker processes: ``pool.run(fn, *args, workers=3)`` calls `fn` as the ranks of one
    job.
    """
    with _open_pool(pytestconfig) as opened:
        yield opened


@pytest.fixture(scope="session")
def toy_pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """As `pool`, with processes of its own: one that has called `toy_device.register` keeps that
    device for ever.
    """
    with _open_pool(pytestconfig) as opened:
        yield opened


@contextmanager
def _open_pool(config: pytest.Config) -> Iterator[Pool]:
    opened = Pool()
    config.stash[POOLS].append(opened)
    yield opened
    config.stash[POOLS].remove(opened)
    opened.close()


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves open files, processes, threads or changed global settings behind."""
    mark = request.node.get_closest_marker("leaks")
    if mark is not None and not mark.args:
        pytest.fail('@pytest.mark.leaks needs a reason: @pytest.mark.leaks("why")', pytrace=False)
    for shared in request.config.stash[POOLS]:
        shared.watch = mark is None
    torch.manual_seed(0)
    watch = leaks.Watch(lambda: _belongings(request.config))
    yield
    leaks.forget_communicator()
    # the traceback of a failed test keeps its objects alive
    # CUDA keeps files and threads of its own for as long as the process lives
    on_gpu = request.node.get_closest_marker("gpu") is not None
    excused = mark is not None or on_gpu or request.node.stash.get(FAILED, False)
    left = watch.finish(linger=0.0 if excused else leaks.LINGER)
    if left and not excused:
        pytest.fail(
            "left behind by this test:\n" + "\n".join(f"  {line}" for line in left), pytrace=False
        )


def _belongings(config: pytest.Config) -> tuple[Collection[int], Collection[leaks.File]]:
    pids, files = set[int](), set[leaks.File]()
    for shared in config.stash[POOLS]:
        own_pids, own_files = shared.belongings()
        pids |= own_pids
        files |= own_files
    return pids, files
