"""The loss against a plain definition, slot by slot in float64."""

import math

import pytest
import torch

from draftgraph.engine.models.drafter import default_target_layer_ids
from draftgraph.engine.models.loss import LossRule, dflash_loss, slot_targets, slot_weights

R, S, A, K, D, V = 3, 19, 5, 4, 16, 23


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (R, S), generator=g)
    mask = torch.rand(R, S, generator=g) < 0.7
    positions = torch.stack([torch.randperm(S - 1, generator=g)[:A].sort().values for _ in range(R)]).int()
    valid = torch.arange(A) < torch.tensor([[5], [3], [0]])
    hidden = torch.randn(R, A, K, D, generator=g)
    head = torch.randn(V, D, generator=g)
    return hidden, head, ids, mask, positions, valid


def plain(hidden, head, ids, mask, positions, valid, gamma):
    """The sum, the weight, matches: one slot at a time, as the paper says it."""
    total = weight = 0.0
    accepted = 0
    for r in range(R):
        for a in range(A):
            if not valid[r, a]:
                continue
            run, start = True, int(positions[r, a])
            accepted += 1
            for k in range(1, K):
                at = start + k
                counts = at < S and bool(mask[r, at])
                logits = head.double() @ hidden[r, a, k].double()
                if counts:
                    w = math.exp(-(k - 1) / gamma)
                    total += w * float(torch.logsumexp(logits, 0) - logits[ids[r, at]])
                    weight += w
                run = run and counts and int(logits.argmax()) == int(ids[r, at])
                accepted += run
    return total, weight, accepted


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_the_plain_definition(seed):
    args = batch(seed)
    sums = dflash_loss(*args, LossRule("decay", 4.0), chunk_slots=7)
    total, weight, accepted = plain(*args, gamma=4.0)
    assert float(sums.loss) == pytest.approx(total, rel=1e-5)
    assert float(sums.weight) == pytest.approx(weight, rel=1e-6)
    assert float(sums.accepted) == accepted and float(sums.blocks) == int(args[-1].sum())


def test_a_label_one_position_off_would_be_seen():
    hidden, head, ids, mask, positions, valid = batch()
    mask = torch.ones_like(mask)
    # A hidden state that points at the token AT a + k, and at nothing else.
    head = torch.nn.functional.one_hot(torch.arange(V), D + V).float()[:, : D + V]
    tokens = slot_targets(ids, mask, positions, valid, K)
    hidden = torch.zeros(R, A, K, D + V)
    hidden[:, :, 1:] = 50 * head[tokens.labels]
    for r in range(R):
        for a in range(A):
            for k in range(1, K):
                if positions[r, a] + k < S:
                    assert tokens.labels[r, a, k - 1] == ids[r, positions[r, a] + k]
    sums = dflash_loss(hidden, head, ids, mask, positions, valid, LossRule(), 64)
    assert float(sums.loss) < 1e-6 and torch.equal(sums.correct_per_slot, sums.counted_per_slot)


def test_chunks_do_not_change_a_bit_of_the_gradient_beyond_rounding():
    grads = []
    for chunk in (1, 7, 1000):
        args = batch()
        args[0].requires_grad_()
        dflash_loss(*args, LossRule("decay", 4.0), chunk).loss.backward()
        grads.append(args[0].grad)
    torch.testing.assert_close(grads[0], grads[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads[1], grads[2], rtol=1e-5, atol=1e-6)


def test_the_gradient_is_autograds():
    hidden, head, ids, mask, positions, valid = batch()
    rule = LossRule("decay", 4.0)
    ours = hidden.clone().requires_grad_()
    dflash_loss(ours, head, ids, mask, positions, valid, rule, 7).loss.backward()
    theirs = hidden.clone().requires_grad_()
    targets = slot_targets(ids, mask, positions, valid, K)
    ce = torch.nn.functional.cross_entropy(
        (theirs[:, :, 1:] @ head.T).flatten(0, 2), targets.labels.flatten(), reduction="none"
    ).view_as(targets.labels)
    (slot_weights(targets.counted, ce.detach(), rule) * ce).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_invalid_blocks_and_unsupervised_slots_have_no_gradient():
    args = batch()
    args[0].requires_grad_()
    dflash_loss(*args, LossRule("decay", 4.0), 8).loss.backward()
    counted = slot_targets(*args[2:], K).counted
    assert not args[0].grad[:, :, 0].any()
    assert not args[0].grad[:, :, 1:][~counted].any() and args[0].grad[:, :, 1:][counted].any(-1).all()


def test_dpace_weights_are_the_plain_definition():
    g = torch.Generator().manual_seed(3)
    ce, counted, alpha = torch.rand(6, 5, generator=g), torch.rand(6, 5, generator=g) < 0.6, 0.5
    found = slot_weights(counted, ce, LossRule("dpace", alpha=alpha))
    for b in range(6):
        q = [(1 - alpha) * math.exp(-float(ce[b, j])) + alpha if counted[b, j] else 1.0 for j in range(5)]
        c = [math.prod(q[: j + 1]) for j in range(5)]
        for j in range(5):
            expected = sum(c[m] for m in range(j, 5) if counted[b, m]) if counted[b, j] else 0.0
            assert float(found[b, j]) == pytest.approx(expected, rel=1e-5)


def test_default_taps_are_the_published_ones():
    assert default_target_layer_ids(5, 64) == (1, 16, 31, 46, 61)
    assert default_target_layer_ids(1, 30) == (15,)
