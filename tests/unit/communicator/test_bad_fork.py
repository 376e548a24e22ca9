"""A worker says so when it was forked from a process in which CUDA was in use."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import LockstepError
from lockstep.launcher.worker_process.worker import refuse_bad_fork


def test_it_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_bad_fork()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(LockstepError, match="--start-method spawn"):
        refuse_bad_fork()
