"""Assertions of `lockstep.testing` and its pytest plugin, in test files of their own."""

from __future__ import annotations

import sys

import pytest

from support import warm_python

# each starts a pytest, which starts workers a dozen times: more than the usual limit on a busy host
pytestmark = pytest.mark.timeout(600)

BEGINNING = """
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.callbacks import Checkpoints
from lockstep.testing import resumes, same_at, survives

DATA = torch.utils.data.TensorDataset(torch.arange(64.).reshape(16, 4) / 64, torch.ones(16, 1))

def ddp(reduction="mean"):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, targets = (each.tensor_split(dist.get_world_size())[dist.get_rank()] for each in DATA.tensors)
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(wrapped(inputs), targets, reduction=reduction).backward()
        optimizer.step()
    return model

def fit(folder, resume="latest"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    trainer = lockstep.Trainer(
        model, torch.optim.Adam(model.parameters()), torch.nn.MSELoss(), 4, run_dir=folder / "run",
        callbacks=[Checkpoints()], virtual_workers=4,
    )
    trainer.fit(DATA, 3, resume=resume)
    return {"model": model, "optimizer": trainer.optimizer}
"""


# the plugin by its module: an entry point is there only where the package has been installed anew
PLUGINS = ("-p", "no:lockstep", "-p", "lockstep.testing.plugin", "-p", "no:cacheprovider")


def run(pytester: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_users=BEGINNING + tests)
    return pytester.runpytest_subprocess(*PLUGINS, *options)


def run_without_workers(pytester: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    """As `run`, in a process that has PyTorch loaded: workers would find in it what pytest has
    put there.
    """
    pytester.makepyfile(test_users=BEGINNING + tests)
    done = warm_python.run(["-m", "pytest", *PLUGINS, *options], pytester.path, timeout=100.0)
    print(done.stdout, done.stderr)
    return pytest.RunResult(
        done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), duration=0.0
    )


def test_the_same_bits_and_the_same_up_to_rounding(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def test_bits():
    same_at(fit, workers=(1, 2))

def test_rounding():
    result = same_at(ddp, workers=(1, 2), rtol=1e-5)
    assert list(result) == ["weight", "bias"]
""",
    )
    result.assert_outcomes(passed=2)


def test_a_difference_is_explained(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def test_fault():
    same_at(lambda: ddp("sum"), workers=(1, 2), rtol=1e-5)
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*<lambda> has another result on 2 workers than on 1 worker: 2 of 2 entries differ*",
            "*weight: 4 of 4 elements differ*",
            "*Cause: gradient scale. The gradient at step 0 is 0.5 times as large*",
        ]
    )


def test_resumes(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def test_killed():
    resumes(fit, at=6, workers=2, resume_workers=1)

def test_begins_anew():
    resumes(lambda folder: fit(folder, None), at=6)

def test_too_late():
    resumes(fit, at=100)
""",
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*has not resumed: started again, it did 12 steps*"])
    result.stdout.fnmatch_lines(["*it cannot be interrupted after step 100*"])


def test_survives(pytester: pytest.Pytester) -> None:
    result = run(pytester, "\ndef test_loss():\n    survives(fit, kill=(1, 4), workers=2)\n")
    result.assert_outcomes(passed=1)


def test_golden(pytester: pytest.Pytester, warm: None) -> None:
    tests = "\ndef test_golden(lockstep_golden):\n    lockstep_golden({'a': torch.arange(3.)})\n"
    run_without_workers(pytester, tests).stdout.fnmatch_lines(["*there is no golden result yet*"])
    stored = run_without_workers(pytester, tests, "--lockstep-update-golden")
    stored.assert_outcomes(passed=1)
    stored.stdout.fnmatch_lines(["lockstep: stored the golden result *test_golden.json"])
    run_without_workers(pytester, tests).assert_outcomes(passed=1)
    changed = run_without_workers(pytester, tests.replace("arange(3.)", "arange(3.) + 1"))
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        ["*the first: a is float32 of shape (3,); begins with 1.0, 2.0, 3.0*"]
    )
    path = pytester.path / "golden" / "test_users" / "test_golden.json"
    path.write_text(path.read_text().replace('"torch": "', '"torch": "of another host '))
    run_without_workers(pytester, tests).assert_outcomes(skipped=1)
    elsewhere = run_without_workers(pytester, tests, "--lockstep-golden-elsewhere=fail")
    elsewhere.assert_outcomes(failed=1)
    elsewhere.stdout.fnmatch_lines(["*were made elsewhere: by torch of another host*"])
    path.write_text("{")
    run_without_workers(pytester, tests).stdout.fnmatch_lines(
        ["*expected a file of golden results, got one that is*"]
    )


def test_bodies_on_workers(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.lockstep_workers(1, 2)
def test_size(lockstep_worker_count):
    assert lockstep.init("cpu").size == lockstep_worker_count

@pytest.mark.lockstep_workers(2)
def test_fails():
    assert lockstep.init("cpu").rank == 0

@pytest.mark.lockstep_workers(2)
def test_skipped():
    pytest.skip("for a reason")
""",
        "-rs",
    )
    result.assert_outcomes(passed=2, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*rank 1: AssertionError*"])
    result.stdout.fnmatch_lines(["*for a reason*"])


def test_the_plugin_imports_nothing_slow(pytester: pytest.Pytester) -> None:
    """It is loaded by every pytest beside which Lockstep is installed."""
    program = (
        "import sys, pytest; before = set(sys.modules); import lockstep.testing.plugin; "
        "print(sorted({'torch', 'numpy', 'msgspec', 'rich'} & (set(sys.modules) - before)))"
    )
    assert pytester.run(sys.executable, "-c", program).outlines == ["[]"]
