"""A whole run in miniature: a tiny random target, token shards of awkward rows, and a profile over both."""

import json
from pathlib import Path

import numpy as np
import pytest

from draftgraph.engine.config import Profile, from_values
from draftgraph.engine.data.schedule import Schedule
from draftgraph.engine.data.writer import ShardWriter
from draftgraph.engine.plan import Plan

VOCAB = 97
WINDOW = 16  # tokens, shorter than most rows of the tests
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 3
# What each tested family needs beyond the sizes of `write_target`.
SHAPES: dict[str, dict] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW, "pad_token_id": 0},
    "olmo2": {},
    "starcoder2": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {},
    "qwen3_5_text": DELTA_NET,
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": ALTERNATING},
    "qwen3_moe": {"num_experts": 8, **EXPERTS},
    "qwen3_5_moe_text": {"num_experts": 8, **EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 8, **EXPERTS, "sliding_window": WINDOW, "layer_types": ALTERNATING},
}
MIXTURES = [family for family, extra in SHAPES.items() if "num_experts_per_tok" in extra]


def write_target(folder: Path, family: str = "llama", **extra: object) -> str:
    """A config.json for `random:`, without the keys that are None; returns the name of the target."""
    values = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        **SHAPES.get(family, {}),
        **extra,
    }
    path = folder / f"{family}.json"
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return f"random:{path}"


def write_shards(folder: Path, rows: list[tuple[int, list[int]]]) -> str:
    """Rows of (length, supervised positions) with random tokens."""
    generator = np.random.default_rng(0)
    with ShardWriter(folder, vocab_size=VOCAB, fingerprint="tiny", max_context=64) as writer:
        for length, supervised in rows:
            mask = np.zeros(length, dtype=bool)
            mask[supervised] = True
            writer.append(generator.integers(0, VOCAB - 1, length), mask)
        writer.finish({})
    return str(folder)


def ordinary_rows(count: int = 24) -> list[tuple[int, list[int]]]:
    """Rows of 5 to 50 tokens whose last two thirds are supervised."""
    lengths = np.random.default_rng(1).integers(5, 50, count).tolist()
    return [(n, list(range(n // 3, n))) for n in lengths]


def profile_values(folder: Path, family: str = "llama", rows: list | None = None, **changes: dict) -> dict:
    values: dict = {
        "run": {"steps": 6, "seed": 3},
        "target": {"model": write_target(folder, family)},
        "drafter": {"layers": 2, "taps": 2, "block_size": 4, "anchors": 8, "mask_token_id": VOCAB - 1},
        "data": {"shards": write_shards(folder / "shards", rows or ordinary_rows())},
        "buckets": {
            "count": 3,
            "max_context": 64,
            "context_tokens": 128,
            "draft_tokens": 128,
            "context_multiple": 8,
        },
        "optim": {"lr": 1e-2, "accumulate": 2},
        "capture": {"mode": "eager", "warmup_rounds": 1, "verify_rounds": 1},
        "checkpoint": {"every": 3, "keep": 3},
        "log": {"every": 2, "wandb": "off"},
    }
    for section, keys in changes.items():
        values.setdefault(section, {}).update(keys)
    return values


def tiny_profile(folder: Path, family: str = "llama", rows: list | None = None, **changes: dict) -> Profile:
    return from_values(profile_values(folder, family, rows, **changes))


def deal_as_for(num_drafters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every profile's rows dealt as for so many drafters: one with fewer trains on the same micro-batches."""

    def schedule(plan: Plan) -> Schedule:
        return Schedule(plan.assignment, plan.buckets, plan.profile.run.seed, num_drafters)

    monkeypatch.setattr(Plan, "schedule", property(schedule))
