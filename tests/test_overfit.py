"""The whole chain at once: what a run learns of one row, decoding accepts on that row, whole blocks at a time."""

import json

import numpy as np
import pytest
import torch
from plain_decoding import greedy
from rich.console import Console
from tiny import VOCAB, profile_values, write_target

from draftgraph.engine.config import from_values
from draftgraph.engine.data.writer import ShardWriter
from draftgraph.engine.models.target import load_model
from draftgraph.engine.train import train

PROMPT, BLOCKS, K = 6, 5, 4


@pytest.mark.parametrize("tied", [True, False])
def test_a_drafter_overfitted_on_a_row_has_whole_blocks_accepted_on_it(tmp_path, tied):
    def target():
        return write_target(tmp_path, "qwen3", tie_word_embeddings=tied, initializer_range=0.4)

    model = load_model(target(), torch.float32, torch.device("cpu"), seed=3)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    prompt = torch.arange(10, 10 + PROMPT)
    # As many tokens as whole blocks emit behind the prompt's own first one, and a block more to learn from.
    answer = greedy(model, prompt, 1 + (BLOCKS + 1) * K)
    assert len(set(answer)) > 6
    with ShardWriter(tmp_path / "row", vocab_size=VOCAB, fingerprint="tiny", max_context=64) as writer:
        row = np.array([*prompt.tolist(), *answer])
        writer.append(row, np.arange(len(row)) >= PROMPT)
        writer.finish({})
    changes = {
        "run": {"steps": 150, "seed": 3},
        "data": {"shards": str(tmp_path / "row")},
        "drafter": {"anchors": 32, "mask_token_id": VOCAB - 1, "block_size": K, "layers": 1, "taps": 2},
        "buckets": {"count": 1, "max_context": 64, "context_tokens": 64, "draft_tokens": 128, "context_multiple": 8},
        "optim": {"lr": 5e-3, "accumulate": 1},
        "checkpoint": {"every": 0},
        "eval": {"every": 150, "count": 1, "new_tokens": 1 + BLOCKS * K},
    }
    values = profile_values(tmp_path, "qwen3", **changes)
    values["target"]["model"] = target()
    summary = train(from_values(values), tmp_path / "run", False, Console(quiet=True))
    assert summary["real_acceptance"] == K
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["real_acceptance_per_slot"] == [1.0] * (K - 1)
