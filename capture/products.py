"""Counts the floating point operations of the matrix products that torch issues inside a block.

Promises the shapes that are executed, forward and backward. Kernels of other packages, convolutions and fused attention
are not counted: torch's own counter, which knows those, refuses grouped heads (seen with torch 2.11). Products in FP8
are counted apart, because they have another ceiling.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Where the two factors stand among the arguments.
_FACTORS = {_aten.mm: 0, _aten.bmm: 0, _aten._grouped_mm: 0, _aten._scaled_mm: 0, _aten.addmm: 1, _aten.baddbmm: 1}


class CountProducts(TorchDispatchMode):
    """`flops` grows while the block runs: 2 per multiplied pair of elements; `fp8_flops` are those of them in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.fp8_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _FACTORS.get(func.overloadpacket)
        if first is not None:
            left, right = args[first : first + 2]
            flops = 2 * left.numel() * right.shape[-1]
            self.flops += flops
            self.fp8_flops += flops if left.dtype == torch.float8_e4m3fn else 0
        return func(*args, **(kwargs or {}))
