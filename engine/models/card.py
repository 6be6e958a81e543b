"""The model card of an export: what the drafter is, the facts of its run, and how its readers load it."""

import json
from typing import Any

from draftgraph.engine.models.drafter import DrafterShape


def model_card(shape: DrafterShape, facts: dict[str, Any], form: str) -> str:
    """README.md of an export.

    Args:
        facts: name to value, shown as they are; `base_model` is the target's name.
        form: "zlab" or "speculators"; decides how it is loaded.
    """
    target = facts.get("base_model", "TARGET")
    front = [f"base_model: {json.dumps(target)}"] if "base_model" in facts else []
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value is not None]
    sliding = shape.layer_types.count("sliding_attention")
    layers = f"{shape.num_layers} layer{'s' * (shape.num_layers > 1)}" + (
        f", {sliding} of them sliding" if sliding else ""
    )
    return "\n".join(
        [
            "---",
            *front,
            "tags: [dflash, speculative-decoding]",
            "---",
            "# DFlash drafter",
            "",
            f"Proposes {shape.block_size - 1} tokens at a time for `{target}`, which checks them in one forward: the",
            f"answers stay its own. {shape.num_parameters:,} parameters in {layers}; embedding and lm_head are the",
            "target's and not in here. Trained with draftgraph.",
            "",
            "| what | value |",
            "|---|---|",
            *rows,
            "",
            "Acceptance lengths count the bonus token, the one that the target adds itself.",
            "",
            "## Load",
            "",
            "FOLDER is where this file lies.",
            "",
            *(SPECULATORS if form == "speculators" else zlab_readers(shape, target)),
            "",
        ]
    )


# The library reads the target's name from config.json, and takes embedding and lm_head from there.
SPECULATORS = [
    "vLLM:",
    "",
    "    vllm serve FOLDER",
    "",
    "The speculators library:",
    "",
    "    from speculators import SpeculatorModel",
    '    drafter = SpeculatorModel.from_pretrained("FOLDER")',
]


def zlab_readers(shape: DrafterShape, target: str) -> list[str]:
    config = json.dumps({"method": "dflash", "model": "FOLDER", "num_speculative_tokens": shape.block_size - 1})
    return [
        "SGLang:",
        "",
        f"    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\",
        f"        --speculative-draft-model-path FOLDER --speculative-num-draft-tokens {shape.block_size}",
        "",
        "vLLM:",
        "",
        f"    vllm serve {target} --speculative-config '{config}'",
        "",
        "transformers, with z-lab's package (`pip install 'dflash[local]'`):",
        "",
        "    from dflash import DFlashDraftModel",
        "    from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'    target, tokenizer = (c.from_pretrained("{target}") for c in (AutoModelForCausalLM, AutoTokenizer))',
        '    drafter = DFlashDraftModel.from_pretrained("FOLDER", dtype=target.dtype)',
        '    ids = tokenizer("def fib(n):", return_tensors="pt").input_ids',
        "    print(tokenizer.decode(drafter.spec_generate(target, ids, 64, [tokenizer.eos_token_id])[0]))",
    ]
