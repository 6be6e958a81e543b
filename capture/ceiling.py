"""The matmul ceiling: what share of a device a step could use at best, measured where and when the step is.

Promises random data (zeros run faster than any real product) and a median. It allocates and waits: set-up only.
"""

from statistics import median

import torch

SIZE = 8192


def matmul_ceiling(device: torch.device, dtype: torch.dtype, rounds: int = 10) -> float:
    """TFLOP/s of a square product of 8192 rows in `dtype` on a CUDA device, as torch is set up in this process."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(SIZE, SIZE, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    times_ms = []
    with torch.cuda.device(device):
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.mm(left, right, out=out)
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
    return 2 * SIZE**3 / median(times_ms) / 1e9
