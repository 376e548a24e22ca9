"""What tests of the command share: the command in this process, and an empty folder with a module
of the user's own.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command import Here, command_here
from support.process import start_server

MODULE = """
import torch
from torch import nn

def five(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 5))
def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(100, 10))
def nothing(): return 3
def silent(): raise ValueError()
def broken():
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    net[1].weight.data.fill_(float("nan"))
    return net
def three(): return torch.utils.data.TensorDataset(torch.zeros(3, 1, 28, 28), torch.zeros(3).long())
def text(): return "data"
def no_data(): return torch.utils.data.TensorDataset(torch.zeros(0, 1, 28, 28), torch.zeros(0).long())
def listed(): return [three(), three()]
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(three())
def stream(): return Stream()
"""


@pytest.fixture(scope="session", autouse=True)
def _server(warm: None) -> None:
    """Whoever launches workers first starts the fork server, and decides what all later ones find
    imported.
    """
    start_server()


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Here:
    """The command, run in this process."""
    return command_here(capfd)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory with a module of the user's own, `mine`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODULE))
    yield tmp_path
    sys.modules.pop("mine", None)
