"""Our export in SpecForge (PyPI `specforge`, 0.2.0): its draft model under its own mask. No line of draftgraph.

    python tests/peers/check_specforge.py FOLDER         # of make_cases.py

Its own decoding is not run: it crops caches to a length, which transformers 5.24 refuses.
"""

import importlib.util
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, logging

TOLERANCE = 1e-5  # max|difference| / max|expected|
PACKAGES = ("", ".core", ".modeling", ".modeling.draft", ".algorithms", ".algorithms.common")


def import_peer():
    """Without its packages' own imports, which start its server."""
    root = Path(importlib.util.find_spec("specforge").origin).parent.parent
    for package in PACKAGES:
        module = types.ModuleType(f"specforge{package}")
        module.__path__ = [str(root.joinpath("specforge", *package.split(".")[1:]))]
        sys.modules[module.__name__] = module
    from specforge.algorithms.common import dflash_family_model
    from specforge.modeling.draft.dflash import DFlashDraftModel

    return dflash_family_model.create_dflash_sdpa_mask, DFlashDraftModel


def check(folder: Path, create_mask, draft_class) -> dict[str, float]:
    case = load_file(folder / "case.safetensors")
    drafter, report = draft_class.from_pretrained(
        folder / "zlab", output_loading_info=True, dtype=torch.float32, attn_implementation="sdpa"
    )
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    drafter.eval()
    row, anchors, size = case["row"][None], case["anchors"][None].long(), drafter.block_size
    blocks = torch.full((anchors.shape[1], size), drafter.mask_token_id)
    blocks[:, 0] = row[0, anchors[0]]
    positions = torch.cat([torch.arange(row.shape[1]), (anchors[0, :, None] + torch.arange(size)).flatten()])
    rule = (anchors, torch.ones_like(anchors, dtype=torch.bool), row.shape[1], size, "cpu")
    masks = {"full_attention": create_mask(*rule)}
    if drafter.sliding_window is not None:
        masks["sliding_attention"] = create_mask(*rule, sliding_window=drafter.sliding_window)
    with torch.no_grad():
        hidden = drafter(
            position_ids=positions[None],
            noise_embedding=target.get_input_embeddings()(blocks.view(1, -1)),
            target_hidden=case["taps"][None],
            attention_mask=masks,
        ).view_as(case["hidden"])
        drafted = target.lm_head(hidden[:, 1:]).argmax(-1)
    return {
        "weights missing or unexpected": sum(len(report[key]) for key in ("missing_keys", "unexpected_keys")),
        "hidden": ((hidden - case["hidden"]).abs().max() / case["hidden"].abs().max()).item(),
        "drafted tokens that differ": int((drafted != case["drafted"]).sum()),
    }


if __name__ == "__main__":
    logging.disable_progress_bar()
    peer, worst = import_peer(), 0.0
    for case in sorted(path.parent for path in Path(sys.argv[1]).glob("*/zlab")):
        result = check(case, *peer)
        print(case.name, result)
        worst = max(worst, *result.values())
    sys.exit(worst > TOLERANCE)
