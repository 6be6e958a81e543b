"""Greedy decoding with a drafter: the target's own tokens, and what is counted."""

import pytest
import torch
import transformers
from torch import Tensor

from draftgraph.engine.models.decode import CachedTarget, decode_plain, decode_speculative
from draftgraph.engine.models.drafter import Drafter, DrafterShape, block_tokens
from draftgraph.engine.models.loss import LossRule, dflash_loss
from draftgraph.engine.models.ops import choose_ops_by_device
from draftgraph.engine.models.target import Target

VOCAB, HIDDEN, TAPS, PROMPT, NEW = 32, 32, (0, 2), 7, 24
FAMILIES = ("llama", "qwen3", "qwen3_5_text", "gemma3_text")
NO_STOP: frozenset[int] = frozenset()


def tiny_target(family: str, tied: bool = False) -> torch.nn.Module:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 256,
    }
    if family == "qwen3_5_text":  # three GatedDeltaNet layers, then one of attention
        sizes |= {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
    if family == "gemma3_text":  # a window shorter than prompt and answer
        sizes |= {"sliding_window": 12, "eos_token_id": None}
        sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.eval().requires_grad_(False)
    choose_ops_by_device(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "lm_head" not in name:
            parameter.normal_(0, 0.3)  # answers that wander, where the usual 0.02 repeats one token
    torch.nn.init.orthogonal_(model.get_output_embeddings().weight)
    return model


def tiny_shape(block_size: int) -> DrafterShape:
    return DrafterShape(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=block_size,
        vocab_size=VOCAB,
        mask_token_id=VOCAB - 1,
        target_layer_ids=TAPS,
        num_target_layers=4,
        layer_types=("full_attention",),
        sliding_window=None,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
    )


def prompt() -> Tensor:
    return torch.randint(VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(2))


def taps_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """The taps of a row, [1, S, N*D], by the extraction that training uses."""
    taps = torch.empty(1, len(ids), len(TAPS) * HIDDEN)
    Target(model, TAPS, 64).extract(ids[None], taps)
    return taps


class ScriptedDrafter(Drafter):
    """Drafts the true continuation but for one slot per block, and keeps what it was shown."""

    def __init__(self, shape: DrafterShape, lm_head: Tensor, row: Tensor, wrong_slot):
        super().__init__(shape, max_context=64)
        self.lm_head, self.row, self.wrong_slot = lm_head, row, wrong_slot
        self.seen: list[Tensor] = []
        self.blocks: list[Tensor] = []

    def forward(self, target_hidden, block_embeddings, anchor_positions, anchor_valid):
        self.seen.append(target_hidden.clone())
        self.blocks.append(block_embeddings.clone())
        K, start = self.shape.block_size, int(anchor_positions)
        drafts = torch.zeros(K, dtype=torch.long)
        known = self.row[start : start + K]
        drafts[: len(known)] = known
        slot = self.wrong_slot(start)
        drafts[slot] = (drafts[slot] + 1) % VOCAB
        return self.lm_head[drafts][
            None, None
        ]  # the rows of the head are orthogonal: each scores its own token highest


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_what_transformers_generates(family):
    model = tiny_target(family)
    expected = model.generate(
        prompt()[None], max_new_tokens=NEW, do_sample=False, pad_token_id=0, attention_mask=torch.ones(1, PROMPT).long()
    )
    tokens = decode_plain(model, prompt(), NEW, NO_STOP)
    assert tokens == expected[0, PROMPT:].tolist()
    assert len(set(tokens)) > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_in_the_shapes_of_a_verify_forward_says_the_same(family):
    model = tiny_target(family)
    assert decode_plain(model, prompt(), NEW, NO_STOP, block_size=5) == decode_plain(model, prompt(), NEW, NO_STOP)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [2, 5])
def test_speculative_output_is_plain_greedy_output_after_any_rejection(family, block_size):
    model = tiny_target(family)
    plain = decode_plain(model, prompt(), NEW, NO_STOP)
    row = torch.cat([prompt(), torch.tensor(plain)])

    def wrong_slot(start: int) -> int:  # 0 is the anchor, which is not drafted: nothing is wrong
        return start % block_size

    drafter = ScriptedDrafter(tiny_shape(block_size), model.get_output_embeddings().weight, row, wrong_slot)
    decoded = decode_speculative(model, drafter, prompt(), NEW, NO_STOP)
    assert decoded.tokens == plain

    emitted, start = [], PROMPT  # every forward emits the drafts before the wrong one and the target's own token
    while start < PROMPT + NEW - 1:
        emitted.append(min(wrong_slot(start) or block_size, PROMPT + NEW - 1 - start))
        start += emitted[-1]
    assert decoded.forwards == len(emitted)
    assert decoded.accepted_per_slot == [sum(n > k for n in emitted) for k in range(1, block_size)]

    # The context is that of a fresh forward over the whole row, also after states were taken back.
    expected = taps_of(model, row)
    for seen in drafter.seen:
        assert (seen - expected[:, : seen.shape[1]]).abs().max() <= 1e-5 * expected.abs().max()
    # And the block is that of training: rows of the embedding, without the scale that Gemma's module applies.
    rows = model.get_input_embeddings().weight
    for block in drafter.blocks:
        assert torch.equal(block[0, 0, 1], rows[VOCAB - 1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_kept", [1, 2, 4, 5])
def test_a_cache_that_took_tokens_back_equals_a_fresh_prefill(family, num_kept):
    model = tiny_target(family)
    generator = torch.Generator().manual_seed(3)
    block, after = torch.randint(VOCAB, (2, 5), generator=generator)
    target = CachedTarget(model)
    with torch.no_grad():
        target.forward(prompt(), logits_to_keep=1)
        before = target.snapshot()
        target.forward(block)
        target.keep(block, num_kept, before)
        logits, _ = target.forward(after)
        fresh, _ = CachedTarget(model).forward(torch.cat([prompt(), block[:num_kept], after]))
    assert (logits - fresh[-5:]).abs().max() <= 1e-5 * fresh.abs().max()


def perfect_decoding(max_new_tokens: int, stop_ids: frozenset[int], block_size: int = 5):
    model = tiny_target("llama")
    plain = decode_plain(model, prompt(), NEW, NO_STOP)
    row = torch.cat([prompt(), torch.tensor(plain)])
    lm_head = model.get_output_embeddings().weight
    drafter = ScriptedDrafter(tiny_shape(block_size), lm_head, row, lambda start: 0)
    return plain, decode_speculative(model, drafter, prompt(), max_new_tokens, stop_ids)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 6, 7, 11])
def test_tokens_beyond_the_limit_are_neither_returned_nor_counted(max_new_tokens):
    plain, decoded = perfect_decoding(max_new_tokens, NO_STOP)
    assert decoded.tokens == plain[:max_new_tokens]
    assert decoded.forwards == -(-(max_new_tokens - 1) // 5)
    assert decoded.forwards + sum(decoded.accepted_per_slot) == max_new_tokens - 1


def test_tokens_after_a_stop_token_are_neither_returned_nor_counted():
    plain, _ = perfect_decoding(NEW, NO_STOP)
    for stop in set(plain):
        expected = plain[: plain.index(stop) + 1]
        _, decoded = perfect_decoding(NEW, frozenset({stop}))
        assert decoded.tokens == expected == decode_plain(tiny_target("llama"), prompt(), NEW, frozenset({stop}))
        assert decoded.forwards + sum(decoded.accepted_per_slot) == len(expected) - 1


@pytest.mark.parametrize("tied", [False, True])
def test_a_drafter_trained_on_a_row_has_its_whole_blocks_accepted_on_that_row(tied):
    """Training and decoding are one computation: what the loss says is learnt is accepted."""
    block_size = 4
    model = tiny_target("qwen3", tied)
    row = torch.cat([prompt(), torch.tensor(decode_plain(model, prompt(), NEW, NO_STOP))])
    taps, embedding, lm_head = taps_of(model, row), model.get_input_embeddings(), model.get_output_embeddings().weight
    drafter = Drafter(tiny_shape(block_size), max_context=64)
    drafter.initialise(0)
    anchors = torch.arange(PROMPT, len(row) - 1, dtype=torch.int32)[None]
    valid = torch.ones_like(anchors, dtype=torch.bool)
    tokens, _ = block_tokens(row[None], anchors, block_size)
    tokens[..., 1:] = drafter.shape.mask_token_id
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(150):
        hidden = drafter(taps, embedding(tokens), anchors, valid)
        sums = dflash_loss(
            hidden, lm_head, row[None], torch.ones(1, len(row), dtype=torch.bool), anchors, valid, LossRule(), 1024
        )
        optimizer.zero_grad()
        (sums.loss / sums.weight).backward()
        optimizer.step()
        if torch.equal(sums.correct_per_slot, sums.counted_per_slot):
            break
    assert torch.equal(sums.correct_per_slot, sums.counted_per_slot)
    decoded = decode_speculative(model, drafter, prompt(), NEW, NO_STOP)
    assert decoded.tokens == row[PROMPT:].tolist()
    assert decoded.forwards == -(-(NEW - 1) // block_size)
