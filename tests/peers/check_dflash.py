"""Our export in z-lab's own package (PyPI `dflash`, 0.1.0): its loader, its mask, its decoding. No line of draftgraph.

python tests/peers/check_dflash.py FOLDER            # of make_cases.py
"""

import json
import sys
from pathlib import Path

import torch
from dflash.model import DFlashDraftModel, extract_context_feature
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, logging

TOLERANCE = 1e-5  # max|difference| / max|expected|


def check(folder: Path) -> dict[str, float]:
    facts, case = json.loads((folder / "case.json").read_text()), load_file(folder / "case.safetensors")
    drafter, report = DFlashDraftModel.from_pretrained(
        folder / "zlab", output_loading_info=True, dtype=torch.float32, attn_implementation="sdpa"
    )
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    drafter.eval()
    row, size, num_prompt = case["row"][None], drafter.block_size, facts["prompt_tokens"]
    with torch.no_grad():
        states = target(row, output_hidden_states=True).hidden_states
        taps = extract_context_feature(states, drafter.target_layer_ids)
        hidden = []
        for anchor in case["anchors"].tolist():
            block = torch.full((1, size), drafter.mask_token_id)
            block[0, 0] = row[0, anchor]
            out = drafter(
                target_hidden=taps[:, :anchor],
                noise_embedding=target.get_input_embeddings()(block),
                position_ids=torch.arange(anchor + size)[None],
            )
            hidden.append(out[0])
        found = torch.stack(hidden)
        drafted = drafter.compute_logits(found[:, 1:], target.lm_head).argmax(-1)
    calls = []
    target.register_forward_hook(lambda *_: calls.append(1))
    answer = drafter.spec_generate(target, row[:, :num_prompt], facts["new_tokens"], None)
    return {
        "weights missing or unexpected": sum(len(report[key]) for key in ("missing_keys", "unexpected_keys")),
        "taps": difference(taps[0], case["taps"]),
        "hidden": difference(found, case["hidden"]),
        "drafted tokens that differ": int((drafted != case["drafted"]).sum()),
        "answer tokens that differ": int((answer != row).sum()),
        "verify forwards that differ": abs(len(calls) - 1 - facts["forwards"]),
    }


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


if __name__ == "__main__":
    logging.disable_progress_bar()
    worst = 0.0
    for case in sorted(path.parent for path in Path(sys.argv[1]).glob("*/zlab")):
        result = check(case)
        print(case.name, result)
        worst = max(worst, *result.values())
    sys.exit(worst > TOLERANCE)
