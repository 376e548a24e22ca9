"""Which errors of a step the workers of an elastic job go on after."""

from __future__ import annotations

import pytest

from lockstep.communicator.elastic_communicator import failure_reason
from lockstep.errors import DesyncError, MembershipChangedError, RankLostError, StallError, TransportError


@pytest.mark.parametrize(
    "error",
    [
        MembershipChangedError(3),
        TransportError("shm: rank 1 is gone"),
        RankLostError(1, "shm: all_reduce: the process of rank 1 (7) has ended"),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"
        ),
    ],
)
def test_a_broken_group_is_one_to_go_on_after(error: RuntimeError) -> None:
    assert failure_reason(error) == str(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        DesyncError("they differ"),
        StallError("slow"),
        RankLostError(1, "Rank 1 has died.", "{}"),
    ],
)
def test_an_error_of_the_program_and_a_report_are_not(error: RuntimeError) -> None:
    with pytest.raises(type(error)) as raised:
        failure_reason(error)
    assert raised.value is error
