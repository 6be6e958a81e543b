"""The gated delta rule over whole rows, by fla's chunked kernels.

Promises: grouped value heads without copies of queries and keys, the decay and the write strength formed in float32
inside fla, no wait for the device. Does not: differentiate, start from a state, or take packed rows (`cu_seqlens`).
"""

from typing import Any

from torch import Tensor


def implementation() -> Any:
    """fla's function. Imported where it is first needed: fla wants a GPU."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def gated_delta(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Read with q a memory that decays by exp(-exp(A_log) * softplus(a + dt_bias)) and is written with k and v.

    Args:
        q, k: [R, S, H, C] contiguous, each head of length 1. q is scaled by C ** -0.5 here.
        v: [R, S, HV, CV] contiguous, HV a multiple of H; value head i reads query head i // (HV // H).
        a: [R, S, HV], of the decay; b: [R, S, HV], sigmoid(b) is the write strength. Any stride.
        A_log, dt_bias: [HV].
    Returns:
        [R, S, HV, CV] contiguous, in q's dtype.
    Stream: the current one. fla tunes its kernels by shape on the first calls: warm up before a capture.
    Error: bfloat16 inputs, 2e-2 of the largest element against float32.
    """
    out, _ = implementation()(
        q, k, v, a, b, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True
    )
    return out
