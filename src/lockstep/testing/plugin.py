"""The pytest plugin: golden results, tests whose body runs on several workers, and their options.

pytest imports this module wherever Lockstep is installed, so it imports nothing slow, PyTorch least
of all, before a test asks for it. Markers and fixtures begin with ``lockstep_``, so that they meet
no names of others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..errors import counted

if TYPE_CHECKING:
    from .golden import Golden

_ELSEWHERE = "lockstep_golden_elsewhere"
_MARKER = "lockstep_workers"
_WORKER_COUNT = "lockstep_worker_count"

_UPDATED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("lockstep", "results of distributed training (lockstep.testing)")
    group.addoption(
        "--lockstep-update-golden",
        action="store_true",
        help="store the results of the lockstep_golden fixture in place of comparing them",
    )
    group.addoption(
        "--lockstep-golden-elsewhere",
        choices=("skip", "fail"),
        help="what happens to a test with golden results of other versions of torch or other "
        "processors alone (default: skip)",
    )
    parser.addini(_ELSEWHERE, "as --lockstep-golden-elsewhere: skip or fail", default="skip")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker.

    Raises:
        pytest.UsageError: the configuration has another word than skip and fail.
    """
    config.stash[_UPDATED] = []
    config.addinivalue_line(
        "markers",
        "lockstep_workers(*counts): the ranks of a job on this host run the test, once for each "
        "number of workers",
    )
    if config.getini(_ELSEWHERE) not in ("skip", "fail"):
        raise pytest.UsageError(
            f"{_ELSEWHERE}: expected skip or fail, got {config.getini(_ELSEWHERE)!r}"
        )


@pytest.fixture
def lockstep_golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    """``lockstep_golden(result)`` compares a result with the one stored in
    ``golden/MODULE/TEST.json`` beside the test.

    It is a `lockstep.testing.Golden`. With a golden result that was made on other hardware, the
    test is skipped or fails, as the option ``--lockstep-golden-elsewhere`` says.
    """
    from .golden import Golden, MadeElsewhereError

    class _OfTest(Golden):
        def __call__(self, result: object, name: str = "") -> None:
            __tracebackhide__ = True
            try:
                super().__call__(result, name)
            except MadeElsewhereError as error:
                if elsewhere == "skip":
                    pytest.skip(str(error))
                pytest.fail(str(error), pytrace=False)

    config = request.config
    elsewhere = config.getoption("--lockstep-golden-elsewhere") or config.getini(_ELSEWHERE)
    node = request.node
    name = node.nodeid.rpartition(".py::")[2].replace("::", ".") or node.name
    folder = Path(node.path).parent / "golden" / Path(node.path).stem
    golden = _OfTest(folder, name, config.getoption("--lockstep-update-golden"))
    yield golden
    config.stash[_UPDATED] += [str(path) for path in golden.updated]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the golden results that have been stored."""
    for path in config.stash[_UPDATED]:
        terminalreporter.write_line(f"lockstep: stored the golden result {path}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each number of workers of the marker.

    Raises:
        pytest.UsageError: the marker has no numbers.
    """
    marker = metafunc.definition.get_closest_marker(_MARKER)
    if marker is None:
        return
    if (
        not marker.args
        or marker.kwargs
        or not all(type(count) is int and count > 0 for count in marker.args)
    ):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: expected @pytest.mark.{_MARKER}(1, 2), with numbers "
            "of workers, got "
            f"{marker.args} and {marker.kwargs}"
        )
    if _WORKER_COUNT not in metafunc.fixturenames:
        metafunc.fixturenames.append(_WORKER_COUNT)
    names = [counted(count, "worker") for count in marker.args]
    metafunc.parametrize(_WORKER_COUNT, marker.args, ids=names, indirect=True)


@pytest.fixture
def lockstep_worker_count(request: pytest.FixtureRequest) -> int:
    """Return the number of workers that run the test, which has the marker ``lockstep_workers``."""
    if not hasattr(request, "param"):
        pytest.fail(
            f"a test with the fixture {_WORKER_COUNT} needs @pytest.mark.{_MARKER}(1, 2)",
            pytrace=False,
        )
    return int(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Let workers run the body of a test with the marker."""
    if pyfuncitem.get_closest_marker(_MARKER) is None:
        return None
    __tracebackhide__ = True
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        pytest.fail(f"@pytest.mark.{_MARKER} takes no async function", pytrace=False)
    from .subject_runs import run_function

    workers = pyfuncitem.callspec.params[_WORKER_COUNT]
    parameters = inspect.signature(pyfuncitem.obj).parameters
    values = {name: pyfuncitem.funcargs[name] for name in parameters if name in pyfuncitem.funcargs}
    error = run_function(pyfuncitem.obj, values, int(str(workers)))
    if getattr(error, "kind", "") == "Skipped":
        pytest.skip(getattr(error, "reason", ""))
    if error is not None:
        # the traceback of what all ranks raise alike is in the error of a worker, the cause
        pytest.fail(str(error.__cause__ or error), pytrace=False)
    return True
