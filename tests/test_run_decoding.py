"""Batched decoding over static caches: token for token what one row after the other gives, whatever is rejected."""

from copy import deepcopy

import pytest
import torch
from decoding_cases import NO_STOP, PROMPT, VOCAB, tiny_shape, tiny_target
from plain_decoding import greedy, speculative
from tiny import SHAPES, WINDOW, write_target

from draftgraph.capture.verify import compare, eager_references
from draftgraph.engine.models.cached_drafter import CachedDrafter
from draftgraph.engine.models.cached_target import CachedTarget
from draftgraph.engine.models.drafter import Drafter
from draftgraph.engine.models.target import load_model
from draftgraph.engine.run.decoding import CHUNK, DecodeLane, slots_for

FAMILIES = ("llama", "qwen3", "qwen3_5_text", "gemma3_text")
NEW = 24
# Shorter and longer than a chunk, and exactly one.
LENGTHS = (PROMPT, CHUNK + 9, CHUNK, 1)


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


def lane_of(model, drafter, stops=NO_STOP, temperature=0.0, new_tokens=NEW, capture=True):
    num_rows = len(LENGTHS)
    slots = slots_for(max(LENGTHS), new_tokens, drafter.shape.block_size)
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    target = CachedTarget(model, drafter.shape.target_layer_ids, num_rows, slots)
    lane = DecodeLane(
        "eval", target, CachedDrafter(deepcopy(drafter), *weights, num_rows, slots), stops, "eager", temperature
    )
    lane.lane.warm_up(1)
    if capture:
        lane.lane.capture()
    lane.drafter.drafter.load_state_dict(drafter.state_dict())  # warm-up left noise
    return lane


def fresh(block_size):
    drafter = Drafter(tiny_shape(block_size), max_context=256)
    drafter.initialise(0, std=0.3)
    return drafter


class ScriptedCache(CachedDrafter):
    """Drafts each row's true answer but for one slot that depends on the position."""

    rows: list

    def script(self, r, start):
        known = self.rows[r][start + 1 : start + self.shape.block_size].tolist()
        wrong = (start + r) % self.shape.block_size  # 0 is the anchor, which is not drafted: nothing is wrong
        return [(token + (k == wrong)) % VOCAB for k, token in enumerate(known, start=1)]

    def logits(self, newest, positions):
        drafts = torch.zeros(len(newest), self.shape.block_size - 1, VOCAB)
        for r, start in enumerate(positions.tolist()):
            for k, token in enumerate(self.script(r, start)):
                drafts[r, k, token] = 1.0
        return drafts


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_by_its_definition_is_what_transformers_generates(family):
    model, row = tiny_target(family), prompts()[0]
    mask = torch.ones_like(row)[None]
    expected = model.generate(row[None], max_new_tokens=NEW, do_sample=False, pad_token_id=0, attention_mask=mask)
    answer = greedy(model, row, NEW)
    assert answer == expected[0, len(row) :].tolist() and len(set(answer)) > 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [2, 5])
def test_a_batch_says_and_counts_what_one_row_after_the_other_does(family, block_size):
    model, drafter = tiny_target(family), fresh(block_size)
    lane = lane_of(model, drafter)
    lane.answer(lane.start(prompts(), NEW))
    for r, prompt in enumerate(prompts()):
        tokens, counts = speculative(model, drafter, prompt, NEW)
        assert lane.rows.answer(r) == tokens
        assert lane.rows.counts[r].tolist() == counts


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_decoding_of_a_batch_is_the_target_s_own(family):
    model, drafter = tiny_target(family), fresh(4)
    lane = lane_of(model, drafter)
    expected = [greedy(model, prompt, NEW) for prompt in prompts()]
    for options in ({"step": "one"}, {"emit_one": True}):
        lane.answer(lane.start(prompts(), NEW), **options)
        assert [lane.rows.answer(r) for r in range(len(expected))] == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [2, 5])
def test_a_batch_is_greedy_after_every_number_of_rejections(family, block_size, monkeypatch):
    model, drafter = tiny_target(family), fresh(block_size)
    lane = lane_of(model, drafter)
    answers = [greedy(model, prompt, NEW) for prompt in prompts()]
    rows = [torch.cat([prompt, torch.tensor(answer)]) for prompt, answer in zip(prompts(), answers, strict=True)]
    monkeypatch.setattr(ScriptedCache, "rows", rows, raising=False)
    lane.drafter.__class__ = ScriptedCache
    lane.answer(lane.start(prompts(), NEW))
    for r, prompt in enumerate(prompts()):
        _, counts = speculative(model, drafter, prompt, NEW, drafts=lambda s, r=r: lane.drafter.script(r, s))
        assert lane.rows.answer(r) == answers[r]
        assert lane.rows.counts[r].tolist() == counts
        assert sum(counts[1:]) > 0


def test_rows_end_at_a_stop_token_or_their_limit_each_by_itself():
    model, drafter = tiny_target("llama"), fresh(4)
    lane = lane_of(model, drafter)
    stop = greedy(model, prompts()[0], NEW)[7]
    lane = lane_of(model, drafter, stops={stop})
    lane.answer(lane.start(prompts(), NEW))
    for r, prompt in enumerate(prompts()):
        tokens, counts = speculative(model, drafter, prompt, NEW, {stop})
        assert lane.rows.answer(r) == tokens
        assert lane.rows.counts[r].tolist() == counts
    assert len(set(lane.rows.length - lane.rows.num_prompt)) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_step_depends_on_its_inputs_alone(temperature):
    """What verification on a GPU compares with graphs: rounds in another order, on rows and caches that others left."""
    lane = lane_of(tiny_target("qwen3_5_text"), fresh(4), temperature=temperature, capture=False)
    references = eager_references([lane.lane])
    lane.lane.capture()
    compare([lane.lane], references)


def test_no_layer_holds_the_tokens_of_a_step_that_is_over_and_the_step_with_most_logits_is_captured_first():
    model = tiny_target("qwen3_5_text")
    lane = lane_of(model, fresh(4))
    lane.answer(lane.start(prompts(), NEW))
    assert all(not {"fed", "written"} & set(vars(cache)) for cache in lane.target.recurrent)
    assert next(iter(lane.lane.steps)).step == "prefill"
    model.config.vocab_size = 250_000
    lane = DecodeLane("eval", lane.target, lane.drafter, NO_STOP, "eager")
    assert [step.step for step in lane.lane.steps] == ["verify", "draft", "prefill", "one"]


def test_rows_without_a_prompt_are_neither_decoded_nor_counted():
    lane = lane_of(tiny_target("qwen3"), fresh(4))
    lane.answer(lane.start(prompts()[:2], NEW))
    assert lane.rows.counts[2:].sum() == 0 and lane.rows.answer(3) == []
    assert len(lane.rows.answer(0)) == NEW


@pytest.mark.parametrize("family", list(SHAPES))
def test_every_tested_family_decodes_over_static_caches(family, tmp_path):
    model = load_model(write_target(tmp_path, family), torch.float32, torch.device("cpu"))
    assert CachedTarget(model, (1,), 2, 64).difference_from_module(WINDOW) < 1e-5
