"""The quick checksum: each bit of each value counts, for every dtype, size and place in memory."""

from __future__ import annotations

import pytest
import torch

from lockstep.parallel.fingerprints import INTEGERS
from lockstep.proof.bit_sums import BitSums, bit_sum

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_single_bit_changes_it(dtype: torch.dtype, size: int) -> None:
    values = torch.randn(size, dtype=torch.float64).to(dtype)
    real = torch.view_as_real(values) if dtype.is_complex else values
    bits = real.view(INTEGERS[real.element_size()]).view(-1)
    before = int(bit_sum(values))
    seen = set()
    for element in range(len(bits)):
        for bit in range(8 * bits.element_size()):
            flip = torch.tensor(1, dtype=bits.dtype) << bit
            bits[element] ^= flip
            seen.add(int(bit_sum(values)))
            bits[element] ^= flip
    assert before not in seen


def test_any_layout_and_place_in_memory() -> None:
    base = torch.randn(9, 5)
    values = base[1:, :]  # at an odd place
    assert int(bit_sum(values)) != int(bit_sum(base))
    transposed = torch.randn(4, 6).t()
    assert int(bit_sum(transposed)) == int(bit_sum(transposed.contiguous()))


def test_the_same_flip_in_two_tensors_is_noticed() -> None:
    tensors = [torch.randn(8) for _ in range(4)]
    sums = BitSums(tensors)
    before = int(sums.total())
    for tensor in tensors[1:3]:
        tensor.view(torch.int32)[3] ^= -(1 << 31)
    assert int(sums.total()) != before


def test_values_are_read_again_also_in_other_memory() -> None:
    parameter, strided = torch.nn.Parameter(torch.randn(4)), torch.randn(4, 6).t()
    sums = BitSums([parameter, strided])
    seen = {int(sums.total())}
    with torch.no_grad():
        parameter[1] += 1
    seen.add(int(sums.total()))
    parameter.data = torch.randn(4)
    seen.add(int(sums.total()))
    strided[2, 1] = 9.0
    seen.add(int(sums.total()))
    assert len(seen) == 4
    assert int(sums.total()) == int(BitSums([parameter, strided]).total())
