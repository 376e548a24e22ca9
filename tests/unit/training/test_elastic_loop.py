"""Which errors of a step the workers of an elastic job go on after."""

from __future__ import annotations

import pytest

from lockstep.errors import DesyncError, MembershipChangedError, StallError, TransportError
from lockstep.training.elastic_loop import ElasticLoop


@pytest.mark.parametrize(
    "error",
    [
        MembershipChangedError(3),
        TransportError("shm: rank 1 is gone"),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"
        ),
    ],
)
def test_a_broken_group_is_one_to_go_on_after(error: RuntimeError) -> None:
    assert ElasticLoop._reason(ElasticLoop.__new__(ElasticLoop), error) == str(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), DesyncError("they differ"), StallError("slow")]
)
def test_an_error_of_the_program_and_a_report_are_not(error: RuntimeError) -> None:
    with pytest.raises(type(error)) as raised:
        ElasticLoop._reason(ElasticLoop.__new__(ElasticLoop), error)
    assert raised.value is error
