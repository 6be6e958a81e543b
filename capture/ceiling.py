"""The matmul ceiling: what share of a device a step could use at best, measured where and when the step is.

Promises random data (zeros run faster than any real product) and a median. It allocates and waits: set-up only.
"""

import functools
import time
from statistics import median
from typing import Any

import torch

SIZE = 8192


def matmul_ceiling(device: torch.device, dtype: torch.dtype, rounds: int = 10, seconds: float = 0.0) -> float:
    """TFLOP/s of a square product of 8192 rows in `dtype` on a CUDA device, as torch is set up in this process.

    In float8_e4m3fn with a scale per row and fast accumulation, as `_scaled_mm` takes them.

    Args:
        rounds: products whose median it is.
        seconds: for which products run before those: after a few, a device is as warm, and its clock as low, as a
            training makes it.
    """
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(SIZE, SIZE, device=device, generator=generator).to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        out = torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device=device)
        scale = torch.ones(SIZE, 1, device=device)
        options: dict[str, Any] = {
            "scale_a": scale,
            "scale_b": scale.T,
            "out_dtype": out.dtype,
            "use_fast_accum": True,
            "out": out,
        }
        product = functools.partial(torch._scaled_mm, left, right.T, **options)
    else:
        product = functools.partial(torch.mm, left, right, out=torch.empty_like(left))
    times_ms = []
    with torch.cuda.device(device):
        product()
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            for _ in range(10):
                product()
            torch.cuda.synchronize()
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            product()
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
    return 2 * SIZE**3 / median(times_ms) / 1e9
