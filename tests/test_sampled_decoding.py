"""Sampled speculative decoding keeps the target's distribution: chi-square against exact probabilities, fixed seeds."""

import torch
from decoding_cases import NO_STOP, VOCAB, prompt, tiny_shape, tiny_target

from draftgraph.engine.models.cached_drafter import CachedDrafter
from draftgraph.engine.models.cached_target import CachedTarget
from draftgraph.engine.models.drafter import Drafter
from draftgraph.engine.models.speculation import draw, probabilities, verify_sampled
from draftgraph.engine.run.decoding import DecodeLane, slots_for


def deviation(found, expected):
    """Of counts from expected counts, in standard deviations of chi-square (Wilson and Hilferty); rare cells joined."""
    found, expected = found.double().flatten(), expected.double().flatten()
    common = expected >= 8
    found, expected = (torch.cat([x[common], x[~common].sum()[None]]) for x in (found, expected))
    found, expected = found[expected > 0], expected[expected > 0]
    df = len(expected) - 1
    statistic = ((found - expected) ** 2 / expected).sum().item()
    return ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5


def uniform(*shape, seed):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_draws_follow_the_weights_and_never_take_what_has_none():
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 4.0, 0.0])
    drawn = draw(weights.expand(20_000, -1), uniform(20_000, seed=1))
    assert abs(deviation(drawn.bincount(minlength=6), weights / 8 * 20_000)) < 3
    assert draw(weights[None], torch.tensor([0.0])).item() == 1
    assert draw(weights[None], torch.tensor([1.0])).item() == 4


def test_each_emitted_token_has_the_target_s_distribution_and_no_other_rule_has():
    num, temperature = 40_000, 0.7
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=generator).expand(num, -1, -1)
    drafted = probabilities(torch.randn(2, 6, generator=generator), temperature).expand(num, -1, -1)
    block = torch.cat([torch.zeros(num, 1, dtype=torch.int64), draw(drafted, uniform(num, 2, seed=2))], 1)
    tokens, accepted = verify_sampled(block, logits, drafted, uniform(num, 3, seed=3), temperature)
    p = probabilities(logits[0], temperature)
    for slot in range(3):
        reached = tokens[accepted >= slot, slot]
        assert len(reached) > 500
        assert abs(deviation(reached.bincount(minlength=6), p[slot] * len(reached))) < 3
    # The drafts themselves are far from it.
    assert deviation(block[:, 1].bincount(minlength=6), p[0] * num) > 20


def test_a_rejection_where_rounding_leaves_nothing_takes_a_token_that_the_target_may_say():
    logits = torch.tensor([[[1.0, 2.0, 0.0, float("-inf")]] * 2])
    drafted = probabilities(logits[:, :1], 1.0) * (1 + 1e-6)
    block, numbers = torch.tensor([[0, 1]]), torch.tensor([[1 - 2**-24, 0.5]])
    tokens, accepted = verify_sampled(block, logits, drafted, numbers, 1.0)
    assert accepted.tolist() == [0] and tokens[0, 0].item() == 1


@torch.no_grad()
def exact_pairs(model, row, temperature):
    """Probability of the second and third token of an answer, [V, V], over all first ones."""
    first = probabilities(model(row[None]).logits[0, -1], temperature)
    rows = torch.cat([row.repeat(VOCAB, 1), torch.arange(VOCAB)[:, None]], 1)
    second = probabilities(model(rows).logits[:, -1], temperature)
    rows = torch.cat([rows.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(VOCAB)[:, None]], 1)
    third = probabilities(model(rows).logits[:, -1], temperature).view(VOCAB, VOCAB, VOCAB)
    return torch.einsum("a,ab,abc->bc", first, second, third)


def test_answers_of_a_batch_have_the_target_s_distribution():
    num_rows, runs, temperature = 512, 8, 0.5
    model, drafter = tiny_target("llama"), Drafter(tiny_shape(3), max_context=256)
    slots = slots_for(7, 4, 3)
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    target = CachedTarget(model, drafter.shape.target_layer_ids, num_rows, slots)
    cached = CachedDrafter(drafter, *weights, num_rows, slots)
    lane = DecodeLane("eval", target, cached, NO_STOP, "eager", temperature, one_token=False)
    lane.lane.warm_up(1)
    lane.lane.capture()
    lane.drafter.drafter.initialise(0, std=0.3)
    expected, found, accepted = exact_pairs(model, prompt(), temperature), torch.zeros(VOCAB, VOCAB), 0.0
    for _ in range(runs):
        lane.answer(lane.start([prompt()] * num_rows, 4))
        answers = torch.tensor([lane.rows.answer(r) for r in range(num_rows)])
        found += (answers[:, 1] * VOCAB + answers[:, 2]).bincount(minlength=VOCAB**2).view(VOCAB, VOCAB)
        accepted += (lane.rows.counts[:, 1:].sum() / lane.rows.counts[:, 0].sum()).item() / runs
    assert abs(deviation(found, expected * num_rows * runs)) < 3
    assert 0.02 < accepted < 1.5
