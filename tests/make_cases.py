"""Writes what the peers are to load: tiny targets, our exports of drafters trained on them, and what ours computes.

    python tests/make_cases.py FOLDER

A case is a folder: target/ as transformers saves it; zlab/ and speculators/, our exports in float32; case.safetensors
and case.json, the expected figures. The checks in peers/ read it and import nothing of draftgraph.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from plain_decoding import greedy, speculative
from safetensors.torch import save_file
from torch import Tensor

from draftgraph.engine.models.drafter import Drafter, DrafterShape, block_tokens
from draftgraph.engine.models.export import export_drafter
from draftgraph.engine.models.loss import LossRule, dflash_loss
from draftgraph.engine.models.target import Target

VOCAB, HIDDEN, TAPS, BLOCK, PROMPT, NEW = 61, 32, (0, 2, 3), 5, 9, 40
SLIDING = ("sliding_attention", "full_attention")
# Target family, does it tie its head, layers of the drafter, their window, its rule. Of the last two speculators alone.
CASES = {
    "tied": ("llama", True, ("full_attention",) * 2, None, "served"),
    "untied": ("qwen3", False, ("full_attention",) * 2, None, "served"),
    "sliding": ("qwen3", False, SLIDING, 12, "served"),
    "wide-window": ("llama", True, SLIDING, 128, "served"),
    "window-of-speculators": ("llama", True, SLIDING, 12, "speculators"),
    "bidirectional-window": ("qwen3", False, SLIDING, 12, "bidirectional"),
}


def tiny_target(family: str, tied: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)  # answers that wander
    return model.eval().requires_grad_(False)


def trained_drafter(model: torch.nn.Module, shape: DrafterShape, row: Tensor, taps: Tensor) -> Drafter:
    """A drafter that has learnt some of the row, so that decoding accepts and rejects."""
    drafter = Drafter(shape, max_context=128)
    drafter.initialise(3)
    anchors = torch.arange(PROMPT, len(row) - 1, dtype=torch.int32)[None]
    valid = torch.ones_like(anchors, dtype=torch.bool)
    tokens, _ = block_tokens(row[None], anchors, BLOCK)
    tokens[..., 1:] = shape.mask_token_id
    blocks = model.get_input_embeddings()(tokens)
    head, mask = model.get_output_embeddings().weight, torch.ones(1, len(row), dtype=torch.bool)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(25):
        sums = dflash_loss(drafter(taps, blocks, anchors, valid), head, row[None], mask, anchors, valid, LossRule(), 99)
        optimizer.zero_grad()
        (sums.loss / sums.weight).backward()
        optimizer.step()
    return drafter.requires_grad_(False)


def write_case(
    folder: Path, family: str, tied: bool, layer_types: tuple[str, ...], window: int | None, rule: str
) -> None:
    model = tiny_target(family, tied)
    model.save_pretrained(folder / "target")
    prompt = torch.randint(3, VOCAB - 1, (PROMPT,), generator=torch.Generator().manual_seed(2))
    row = torch.cat([prompt, torch.tensor(greedy(model, prompt, NEW))])
    taps = torch.empty(1, len(row), len(TAPS) * HIDDEN)
    Target(model, TAPS, 128).extract(row[None], taps)
    shape = DrafterShape(
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_layers=len(layer_types),
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        block_size=BLOCK,
        vocab_size=VOCAB,
        mask_token_id=VOCAB - 1,
        target_layer_ids=TAPS,
        num_target_layers=6,
        layer_types=layer_types,
        sliding_window=window,
        rope_theta=5e4,
        rms_norm_eps=1e-5,
        sliding_rule=rule,
    )
    drafter = trained_drafter(model, shape, row, taps)
    for form in ("zlab", "speculators") if rule == "served" else ("speculators",):
        card = {"base_model": str(folder / "target")}
        export_drafter(folder / form, drafter, model.config, form=form, dtype=torch.float32, card=card)

    anchors = torch.arange(4, len(row) - BLOCK, 3, dtype=torch.int32)[None]
    tokens, _ = block_tokens(row[None], anchors, BLOCK)
    tokens[..., 1:] = shape.mask_token_id
    hidden = drafter(taps, model.get_input_embeddings()(tokens), anchors, torch.ones_like(anchors, dtype=torch.bool))[0]
    _, (forwards, *accepted) = speculative(model, drafter, prompt, NEW)
    # All or nothing would show little.
    assert -(-(NEW - 1) // BLOCK) < forwards < NEW - 1, accepted
    tensors = {
        "row": row,
        "taps": taps[0],
        "anchors": anchors[0],
        "hidden": hidden,
        "drafted": (hidden[:, 1:] @ model.get_output_embeddings().weight.T).argmax(-1),
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "case.safetensors")
    # All anchors that speculators may choose, all tokens supervised: nothing of its step is left to chance.
    every = torch.arange(len(row) - BLOCK, dtype=torch.int32)[None]
    tokens, _ = block_tokens(row[None], every, BLOCK)
    tokens[..., 1:] = shape.mask_token_id
    valid, mask = torch.ones_like(every, dtype=torch.bool), torch.ones(1, len(row), dtype=torch.bool)
    out = drafter(taps, model.get_input_embeddings()(tokens), every, valid)
    final = model.get_decoder()(row[None]).last_hidden_state
    losses = {}
    for name, labels in (("kl_div", "target"), ("ce", "argmax")):
        kind = LossRule("decay", 4.0, labels=labels, norm="slots")
        sums = dflash_loss(out, model.get_output_embeddings().weight, row[None], mask, every, valid, kind, 64, final)
        losses[name] = float(sums.loss / sums.weight)
    facts = {"losses": losses, "prompt_tokens": PROMPT, "new_tokens": NEW, "forwards": forwards}
    facts["comparable_in_speculators"] = rule != "served" or window is None or window > len(row)
    (folder / "case.json").write_text(json.dumps(facts, indent=1) + "\n")


def main(folder: Path) -> None:
    transformers.logging.disable_progress_bar()
    for name, case in CASES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_case(folder / name, *case)
        print(f"{name}: written")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
