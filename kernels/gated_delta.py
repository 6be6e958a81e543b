"""The gated delta rule by fla's kernels: over whole rows in chunks, and over a few tokens from a state.

Promises: grouped value heads without copies of queries and keys, the decay and the write strength in float32, no wait
for the device. Does not: differentiate, or take packed rows (`cu_seqlens`).
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


def gated_delta_from(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule over a few tokens, one after the other, from a memory.

    Args:
        q, k: [R, n, H, C], brought to length 1 here; q is scaled by C ** -0.5.
        v: [R, n, HV, CV], HV a multiple of H.
        log_decay, strength: [R, n, HV] float32; 0 and 0 leave the memory as it is.
        memory: [R, HV, C, CV] float32, read.
    Returns:
        [R, n, HV, CV] in q's dtype, and the memory after the last token.
    Stream: the current one. fla's recurrent kernel does not tune itself.
    """
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return fused_recurrent_gated_delta_rule(
        q, k, v, log_decay, beta=strength, initial_state=memory, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
