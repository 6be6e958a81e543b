"""Our exports in the speculators library (PyPI, 0.9.0): loaded, converted, saved; its losses. No line of draftgraph.

    python tests/peers/check_speculators.py FOLDER       # of make_cases.py

Its own window (kv >= a - W for every slot) is not the one that SGLang and vLLM serve and that we train: a case whose
window is shorter than its row is not compared by its output.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from loguru import logger
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from transformers import AutoModelForCausalLM, logging

TOLERANCE = 1e-5  # max|difference| / max|expected|


def check(folder: Path) -> dict[str, float]:
    facts, case = json.loads((folder / "case.json").read_text()), load_file(folder / "case.safetensors")
    _, report = SpeculatorModel.from_pretrained(folder / "speculators", output_loading_info=True)
    config = SpeculatorModelConfig.from_pretrained(folder / "speculators")
    config.transformer_layer_config._attn_implementation = "eager"  # flex_attention would compile
    drafter = SpeculatorModel.from_pretrained(folder / "speculators", config=config, dtype=torch.float32).eval()
    exported = load_file(folder / "speculators" / "model.safetensors")
    with tempfile.TemporaryDirectory() as saved:
        drafter.save_pretrained(saved)
        again = load_file(Path(saved, "model.safetensors"))
        config_again = json.loads(Path(saved, "config.json").read_text())
    ours = json.loads((folder / "speculators" / "config.json").read_text())
    found: dict[str, float] = {
        "weights missing or unexpected": sum(len(report[key]) for key in ("missing_keys", "unexpected_keys")),
        "weights that it saves in another way": weights_that_differ(exported, again),
        "fields that it saves in another way": fields_that_differ(ours, config_again),
    }
    if (folder / "zlab").is_dir():
        converted = SpeculatorModel.from_pretrained(folder / "zlab", verifier=str(folder / "target"))
        trained = {name: tensor for name, tensor in converted.state_dict().items() if name in exported}
        found["weights that it converts in another way"] = weights_that_differ(exported, trained)
        found["fields that it converts in another way"] = fields_that_differ(ours, converted.config.to_dict())
    row, anchors = case["row"][None], case["anchors"].long()
    chosen = torch.zeros_like(row)
    chosen[0, anchors] = 1  # as many as it is asked for: it takes all of them, in order
    with torch.no_grad():
        hidden, logits, _, _, indices = drafter._backbone_forward(
            hidden_states=case["taps"][None],
            input_ids=row,
            loss_mask=chosen,
            verifier_last_hidden_states=torch.zeros(1, row.shape[1], drafter.hidden_size),
            document_ids=torch.zeros_like(row),
            max_anchors=len(anchors),
        )
    assert indices.view(len(anchors), -1)[:, 0].tolist() == anchors.tolist()
    if facts["comparable_in_speculators"]:
        expected = case["hidden"]
        hidden, drafted = hidden.view_as(expected), logits.argmax(-1).view(len(anchors), -1)[:, 1:]
        found["hidden"] = ((hidden - expected).abs().max() / expected.abs().max()).item()
        found["drafted tokens that differ"] = int((drafted != case["drafted"]).sum())
        for name, expected in facts["losses"].items():
            found[f"loss {name}"] = abs(loss(drafter, folder, case, name) - expected) / expected
    return found


def loss(drafter: torch.nn.Module, folder: Path, case: dict[str, torch.Tensor], name: str) -> float:
    """Of its whole training step with every token supervised and every anchor chosen."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    last = []
    target.get_decoder().layers[-1].register_forward_hook(lambda _module, _inputs, out: last.append(out))
    row = case["row"][None]
    with torch.no_grad():
        target(row)
        _, found, _ = drafter(
            hidden_states=case["taps"][None],
            input_ids=row,
            loss_mask=torch.ones_like(row),
            verifier_last_hidden_states=last[0],
            document_ids=torch.zeros_like(row),
            loss_config=resolve_loss_config(name, "eager"),
            gamma=4.0,
            max_anchors=row.shape[1] - drafter.block_size,
        )
    return float(found)


def weights_that_differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    return len(a.keys() ^ b.keys()) + sum(not torch.equal(a[name], b[name]) for name in a.keys() & b.keys())


def fields_that_differ(ours: dict, theirs: dict) -> int:
    """Of what the library knows; it leaves out what equals a default."""
    known = ("speculators_model_type", "speculators_config", "draft_vocab_size", "block_size", "mask_token_id")
    known += ("aux_hidden_state_layer_ids", "sliding_window_non_causal", "sample_from_anchor", "architectures")
    differing = [name for name in known if ours[name] != theirs[name]]
    layer = theirs["transformer_layer_config"]
    layer = layer if isinstance(layer, dict) else layer.to_dict()
    differing += [name for name, value in layer.items() if ours["transformer_layer_config"].get(name, value) != value]
    if differing:
        print("differing:", {name: (ours.get(name), theirs.get(name), layer.get(name)) for name in differing})
    return len(differing)


if __name__ == "__main__":
    logging.disable_progress_bar()
    logger.remove()
    worst = 0.0
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # its converter leaves a folder there
        for case in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
            result = check(case)
            print(case.name, result)
            worst = max(worst, *result.values())
    sys.exit(worst > TOLERANCE)
