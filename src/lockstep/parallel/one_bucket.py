"""The gradients of a small model, averaged over the workers by one all-reduce, with the other
numbers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .. import observers
from ..communicator import Communicator
from .gradient_buckets import Bucket

MOST_BYTES = 1 << 20
"""Bytes of the gradients that are sent at once: the first bucket of DistributedDataParallel."""

# for the places of all workers; many numbers cost less in a message of their own
_MOST_BYTES_OF_NUMBERS = 1 << 16

_DTYPES = (torch.float32, torch.float64)


class OneBucket:
    """Averages gradients over the workers and sums a few numbers, by one all-reduce after the last
    backward pass.

    DistributedDataParallel sends a bucket of gradients while the backward pass computes those of
    the next one. Where all fit into its first bucket, that is full when the pass has ended: there
    is nothing to overlap, and an all-reduce in the background wakes a thread, which takes longer
    than such an all-reduce.

    Gradients are divided by the number of workers and then added, in their own dtype, as
    DistributedDataParallel does. The numbers are sums in float64, which that dtype would round. So
    the message has places for each worker: its numbers lie there in pieces of 16 bits, each a whole
    number that the dtype holds exactly. All other workers add zeros to them. Every worker then has
    the numbers of all, and adds them up.

    After a step, each ``.grad`` is a view of the message's memory, until the next step.

    Args:
        parameters: those that are trained, in the same order on every worker; see `fits`.
        comm: communicator over the workers, at least two.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Communicator) -> None:
        self._comm = comm
        self._bucket = Bucket(parameters, virtual_workers=1)
        self._make_message(0)

    @staticmethod
    def fits(parameters: Sequence[nn.Parameter], comm: Communicator, numbers: int) -> bool:
        """Return whether gradients and numbers can be sent in this way, and should be.

        Args:
            parameters: those that are trained, at least one.
            comm: communicator over the workers.
            numbers: the most that a step sums beside the gradients.
        """
        dtype = parameters[0].dtype
        device = parameters[0].device
        alike = all(
            type(p) is nn.Parameter and p.dtype is dtype and p.device == device for p in parameters
        )
        if not alike or dtype not in _DTYPES or device.type != comm.device.type:
            return False
        pieces = torch.float64.itemsize // 2  # of 16 bits
        bytes_of_numbers = numbers * pieces * comm.size * dtype.itemsize
        return (
            sum(p.nbytes for p in parameters) <= MOST_BYTES
            and bytes_of_numbers <= _MOST_BYTES_OF_NUMBERS
        )

    def _make_message(self, pieces: int) -> None:
        """Allocate the message: the gradients, and so many pieces of the numbers of each worker."""
        first = self._bucket.parameters[0]
        size = self._comm.size
        end = self._bucket.numel
        # Zeros, because the gaps between parameters are sent and added as well.
        self._message = torch.zeros(end + size * pieces, dtype=first.dtype, device=first.device)
        self._gradients = self._message[:end]
        self._places = self._message[end:].view(size, pieces)
        self._own_place = self._places[self._comm.rank]
        # Through .data each is a tensor of its own for autograd, which a program may change as any
        # gradient.
        self._views = [view.data for view in self._bucket.views(self._message)]

    def average(self, numbers: torch.Tensor) -> torch.Tensor:
        """Set the gradients to their averages over all workers; a parameter without one on a worker
        adds nothing.

        Args:
            numbers: 1-d floating tensor, of one size and dtype on all workers.

        Returns:
            The sums of `numbers` over all workers.
        """
        pieces = numbers.view(torch.int16)
        if len(pieces) != len(self._own_place):
            self._make_message(len(pieces))
        self._collect()
        self._places.zero_()
        self._own_place.copy_(pieces)
        with observers.active().reducing(self._comm.size):
            self._comm.allreduce(self._message)
        for p, view in zip(self._bucket.parameters, self._views, strict=True):
            p.grad = view
        return self._places.to(torch.int16).view(numbers.dtype).sum(0)

    def _collect(self) -> None:
        """Copy this worker's share of the averages into the message."""
        views = []
        gradients = []
        for p, view in zip(self._bucket.parameters, self._views, strict=True):
            if p.grad is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        if views:
            torch._foreach_copy_(views, gradients)
        self._gradients.mul_(1 / self._comm.size)
