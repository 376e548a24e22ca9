"""Communicators made from that of an elastic job are no members of it themselves."""

from __future__ import annotations

import torch

from lockstep.communicator.elastic_communicator import ElasticCommunicator
from lockstep.topology import World


def test_a_communicator_made_from_it_publishes_nothing() -> None:
    part = ElasticCommunicator.at(World(), torch.device("cpu"))  # as `split` makes it
    assert not hasattr(part, "client")
    assert part.broadcast_object(3) == 3
    assert part.on_rank0(lambda: 4) == 4
