"""The twin against the mask's definition, query by query; the Triton kernels against the twin.

Without a GPU the kernels run in Triton's interpreter, with one they are compiled.
"""

from collections.abc import Callable

import pytest
import torch
from attention_cases import assert_close, draw_inputs, empty_is_nan, poison_pads, run
from torch import Tensor

from draftgraph.kernels import anchor_attention as kernel
from draftgraph.kernels import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTIONS = pytest.mark.parametrize(
    "attention", [reference.anchor_attention, kernel.anchor_attention], ids=["twin", "kernel"]
)
RULES = pytest.mark.parametrize("rule", ["served", "speculators", "bidirectional"])
WINDOWS = pytest.mark.parametrize("window", [None, 9])


def definition(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    anchor_positions: Tensor,
    anchor_valid: Tensor,
    window: int | None,
    scale: float,
    rule: str,
) -> Tensor:
    """The mask written out: one query at a time, over the list of what it may see."""
    out = torch.zeros_like(q)
    K, H = q.shape[2:4]
    S, G = context_k.shape[1:3]
    for r, j in anchor_valid.nonzero().tolist():
        a = int(anchor_positions[r, j])
        for k in range(K):
            oldest = 0 if window is None else a + k - (window - 1) if rule == "served" else a - window
            seen = [kv for kv in range(S) if oldest <= kv < a]
            mates = [i for i in range(K) if window is None or rule == "bidirectional" or i <= k]
            for h in range(H):
                g = h // (H // G)
                keys = torch.cat([context_k[r, seen, g], block_k[r, j, mates, g]])
                values = torch.cat([context_v[r, seen, g], block_v[r, j, mates, g]])
                out[r, j, k, h] = (keys @ q[r, j, k, h] * scale).softmax(0) @ values
    return out


@RULES
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_twin_is_the_mask_written_out(window: int | None, rule: str) -> None:
    inputs = draw_inputs((3, 21, 5, 4, 6, 2, 8), (5, 2, 0), torch.float64)
    dout = torch.randn_like(inputs[0])
    expected = run(definition, inputs, window, dout, rule)
    assert_close(run(reference.anchor_attention, inputs, window, dout, rule), expected, "float64 twin, definition")


@RULES
@pytest.mark.parametrize("window", [1, 4, 20, 33, 110])
def test_kernel_equals_its_twin_under_every_rule(window: int, rule: str) -> None:
    inputs = draw_inputs((2, 150, 40, 3, 2, 1, 16), (38, 3), device=DEVICE)
    dout = torch.randn_like(inputs[0])
    with empty_is_nan():
        found = run(kernel.anchor_attention, inputs, window, dout, rule)
    tolerance = "float32 interpreter, twin" if DEVICE == "cpu" else "float32 kernel, twin"
    assert_close(found, run(reference.anchor_attention, inputs, window, dout, rule), tolerance)


@pytest.mark.parametrize(
    ("sizes", "num_valid", "window"),
    [
        ((2, 45, 5, 10, 4, 1, 16), (5, 3), None),
        ((2, 45, 5, 10, 4, 1, 16), (5, 0), 9),
        ((1, 70, 20, 4, 2, 2, 32), (18,), None),
        ((1, 70, 20, 4, 2, 2, 32), (20,), 33),
        ((1, 40, 3, 16, 3, 1, 64), (3,), None),
        ((1, 40, 3, 16, 3, 1, 64), (2,), 20),
        ((1, 20, 3, 8, 1, 1, 128), (3,), 12),
        ((1, 9, 17, 2, 1, 1, 16), (8,), None),
        ((1, 70, 70, 2, 1, 1, 16), (70,), 7),
        ((1, 150, 40, 2, 2, 1, 16), (38,), 110),
        ((1, 130, 12, 3, 8, 2, 16), (12,), None),
        ((1, 1, 1, 2, 2, 2, 16), (1,), None),
        ((2, 3, 2, 8, 1, 1, 16), (0, 0), 1),
        ((2, 3, 2, 8, 4, 1, 16), (0, 0), None),
        ((3, 1, 3, 4, 3, 1, 64), (1, 0, 1), None),
        ((1, 33, 5, 6, 4, 1, 64), (4,), 12),
        ((1, 20, 3, 4, 3, 1, 256), (3,), None),
    ],
)
def test_kernel_equals_its_twin(sizes: tuple[int, ...], num_valid: tuple[int, ...], window: int | None) -> None:
    inputs = draw_inputs(sizes, num_valid, device=DEVICE)
    dout = torch.randn_like(inputs[0])
    with empty_is_nan():
        found = run(kernel.anchor_attention, inputs, window, dout)
    tolerance = "float32 interpreter, twin" if DEVICE == "cpu" else "float32 kernel, twin"
    assert_close(found, run(reference.anchor_attention, inputs, window, dout), tolerance)


@ATTENTIONS
@WINDOWS
def test_pads_may_hold_nan(attention: Callable[..., Tensor], window: int | None) -> None:
    inputs = draw_inputs((3, 40, 5, 10, 2, 1, 16), (5, 3, 0), device=DEVICE)
    valid = inputs[-1][:, :, None, None, None]
    dout = torch.randn_like(inputs[0])
    clean = run(attention, inputs, window, dout)
    poisoned = run(attention, poison_pads(inputs), window, dout.masked_fill(~valid, float("nan")))
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)


@ATTENTIONS
@WINDOWS
def test_invalid_blocks_give_zero_and_get_no_gradient(attention: Callable[..., Tensor], window: int | None) -> None:
    inputs = draw_inputs((2, 20, 4, 4, 2, 1, 16), (2, 0), device=DEVICE)
    out, dq, dk, dv, block_dk, block_dv = run(attention, inputs, window, torch.randn_like(inputs[0]))
    for draft in (out, dq, block_dk, block_dv):
        assert not draft[~inputs[-1]].any() and draft[inputs[-1]].all()
    last_anchor = int(inputs[-2].max())
    for context in (dk, dv):
        assert not context[0, last_anchor:].any() and not context[1].any()


@ATTENTIONS
@WINDOWS
def test_nothing_leaks_from_the_anchor_on_or_from_another_block(
    attention: Callable[..., Tensor], window: int | None
) -> None:
    inputs = draw_inputs((1, 50, 6, 10, 2, 1, 16), (6,), device=DEVICE)
    block = 3
    anchor = int(inputs[5][0, block])
    oldest = 0 if window is None else anchor - (window - 1)
    others = torch.arange(6) != block

    def output(changed: list[Tensor]) -> Tensor:
        return attention(*changed, window, 0.25)[:, block]

    disturbed = [tensor.clone() for tensor in inputs]
    for draft in (0, 3, 4):
        disturbed[draft][:, others] = torch.randn_like(disturbed[draft][:, others]) * 10
    for context in (1, 2):
        disturbed[context][:, anchor:] = 1e4
        disturbed[context][:, :oldest] = -1e4
    assert torch.equal(output(disturbed), output(inputs))

    # The mask is not too narrow either: the last position before the anchor and the oldest of the window count.
    for position in (anchor - 1, oldest):
        disturbed = [tensor.clone() for tensor in inputs]
        disturbed[2][:, position] += 1
        assert not torch.equal(output(disturbed), output(inputs))


@ATTENTIONS
def test_a_sliding_block_is_causal_and_a_full_one_is_not(attention: Callable[..., Tensor]) -> None:
    inputs = draw_inputs((1, 20, 2, 8, 1, 1, 16), (2,), device=DEVICE)
    disturbed = [tensor.clone() for tensor in inputs]
    disturbed[4][:, :, 5] += 1
    for window, changed_slots in ((9, range(5, 8)), (None, range(8))):
        before = attention(*inputs, window, 0.25)
        after = attention(*disturbed, window, 0.25)
        changed = [slot for slot in range(8) if not torch.equal(before[:, :, slot], after[:, :, slot])]
        assert changed == list(changed_slots)


def test_other_layouts_are_taken() -> None:
    inputs = draw_inputs((2, 20, 3, 4, 2, 1, 16), (3, 2), device=DEVICE)
    strided = [*(tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in inputs[:5]), *inputs[5:]]
    dout = torch.randn_like(inputs[0])
    for a, b in zip(
        run(kernel.anchor_attention, strided, None, dout), run(kernel.anchor_attention, inputs, None, dout), strict=True
    ):
        assert torch.equal(a, b)
