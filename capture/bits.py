"""Hashes and compares tensors bit by bit on their own device, with small temporaries.

Promises that one flipped bit changes the hash, that the order of elements counts, and that NaNs are bits like any
other. Integer sums wrap and commute, so the result does not depend on how the device reduces.
It is no cryptographic hash: nobody chooses the tensors to deceive it.
"""

import torch
from torch import Tensor

# Elements per chunk: 32 MiB for each int64 temporary. Of fewer, a GPU waits for the launches.
_CHUNK = 1 << 22
# Odd constants with bits all over: splitmix64's, and the fractional part of the golden ratio; as signed 64-bit.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BitHasher:
    """Makes 128-bit hashes of tensors on one device.

    Owns: two weights per position of a chunk, 64 MiB.
    """

    def __init__(self, device: torch.device) -> None:
        position = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device)
        # Odd weights: a change of one element is a change of at most 64 bits times an odd number, which is never 0.
        self._weights = [_mixed(position * _GOLDEN + seed) | 1 for seed in (0, _MIX_A)]

    def digest(self, tensor: Tensor) -> Tensor:
        """The hash of a tensor's bits, as [2] int64 on its device; issued on the current stream, without a wait."""
        flat = tensor.detach().reshape(-1)
        bits = flat.view(_INTEGER_OF_SIZE[flat.element_size()])
        totals = [torch.full((), flat.numel(), dtype=torch.int64, device=flat.device) for _ in self._weights]
        for chunk in bits.split(_CHUNK):
            wide = chunk.to(torch.int64)
            for total, weight in zip(totals, self._weights, strict=True):
                # An odd factor per chunk makes the order of chunks count as well.
                total.mul_(_MIX_B).add_((wide * weight[: len(wide)]).sum())
        return torch.stack(totals)


def max_difference(first: Tensor, second: Tensor) -> float:
    """The largest |first - second|; equal infinities and NaNs on both sides count as 0, a NaN on one side as NaN."""
    largest = []
    for a, b in zip(first.reshape(-1).split(_CHUNK), second.reshape(-1).split(_CHUNK), strict=True):
        x, y = a.double(), b.double()
        same = (x == y) | (x.isnan() & y.isnan())
        largest.append(torch.where(same, 0.0, (x - y).abs()).max())
    return float(torch.stack(largest).max())


def _mixed(value: Tensor) -> Tensor:
    # The sign bits that an arithmetic shift drags in are as good as zeros here.
    value = (value ^ (value >> 30)) * _MIX_A
    value = (value ^ (value >> 27)) * _MIX_B
    return value ^ (value >> 31)
