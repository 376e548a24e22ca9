"""The communicator of an elastic job, without a job."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lockstep.communicator.elastic_communicator import ElasticCommunicator
from lockstep.errors import MembershipChangedError
from lockstep.topology import World


def test_a_communicator_made_from_it_publishes_nothing() -> None:
    part = ElasticCommunicator.at(World(), torch.device("cpu"))  # as `split` makes it
    assert not hasattr(part, "client")
    assert part.broadcast_object(3) == 3
    assert part.on_rank0(lambda: 4) == 4


def test_a_group_is_left_that_had_been_made_but_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next change may come when c10d knows the group, and has not said that it is the default
    one.
    """
    comm: Any = ElasticCommunicator.at(World(), torch.device("cpu"))
    comm.client, comm._store, comm._hooks = (
        SimpleNamespace(generation=1),
        None,
        (sys.excepthook, sys.excepthook),
    )

    def make_group() -> None:
        c10d._world.group_count = 0
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def change(group: Any) -> NoReturn:
        raise MembershipChangedError(1)

    with monkeypatch.context() as patched, pytest.raises(MembershipChangedError):
        patched.setattr(c10d, "_update_default_pg", change)
        make_group()
    comm.leave_group()
    make_group()
    comm.leave_group()
    assert not c10d._world.pg_map


def test_the_exception_hook_of_a_group_goes_with_it_when_the_next_change_has_come_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The change is raised at any place, also after torch has set its hook."""
    comm: Any = ElasticCommunicator.at(World(), torch.device("cpu"))
    comm.client = SimpleNamespace(generation=1, check=lambda: None)
    comm._backend = "gloo"
    comm._hooks = sys.excepthook, sys.excepthook
    before = sys.excepthook
    init = dist.init_process_group

    def init_and_change(*args: Any, **kw: Any) -> NoReturn:
        init("gloo", store=dist.HashStore(), rank=0, world_size=1)
        raise MembershipChangedError(1)

    with monkeypatch.context() as patched, pytest.raises(MembershipChangedError):
        patched.setattr(dist, "init_process_group", init_and_change)
        comm._make_group(SimpleNamespace(generation=1, members=[0, 1]), 0)
    assert sys.excepthook is not before
    comm.leave_group()
    assert sys.excepthook is before
