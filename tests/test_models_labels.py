"""Labels from the target's own distribution, and loss norms: against plain definitions, through a whole run."""

import math

import pytest
import torch
from rich.console import Console
from test_models_loss import A, D, K, R, S, batch
from tiny import tiny_profile, write_target

from draftgraph.engine.build import build
from draftgraph.engine.errors import UsageError
from draftgraph.engine.models.loss import LossRule, dflash_loss, slot_targets, slot_weights
from draftgraph.engine.models.target import Target, load_model
from draftgraph.engine.plan import make_plan
from draftgraph.engine.train import train

CPU = torch.device("cpu")


def states(seed=9):
    return torch.randn(R, S, D, generator=torch.Generator().manual_seed(seed))


def plain(args, rule):
    """Sums of loss and of what divides it, matches: one slot at a time in float64, as the papers say it."""
    hidden, head, _, mask, positions, valid = args
    total = weight = slots = 0.0
    rows, matches = set(), 0
    for r, a in ((r, a) for r in range(R) for a in range(A) if valid[r, a]):
        rows.add(r)
        for k in range(1, K):
            at = int(positions[r, a]) + k
            if at >= S or not mask[r, at]:
                continue
            drafted = (head.double() @ hidden[r, a, k].double()).log_softmax(0)
            own = (head.double() @ states()[r, at - 1].double()).log_softmax(0)
            loss = float((own.exp() * (own - drafted)).sum() if rule.labels == "target" else -drafted[own.argmax()])
            w = math.exp(-(k - 1) / rule.gamma)
            total, weight, slots = total + w * loss, weight + w, slots + 1
            matches += int(drafted.argmax() == own.argmax())
    return total, {"weights": weight, "slots": slots, "rows": len(rows)}, matches


@pytest.mark.parametrize("labels", ["target", "argmax"])
@pytest.mark.parametrize("norm", ["weights", "slots", "rows"])
def test_labels_of_the_target_are_the_plain_definition(labels, norm):
    args, rule = batch(), LossRule("decay", 4.0, labels=labels, norm=norm)
    sums = dflash_loss(*args, rule, 7, states())
    total, divisors, matches = plain(args, rule)
    assert float(sums.loss) == pytest.approx(total, rel=1e-5)
    assert float(sums.weight) == pytest.approx(divisors[norm], rel=1e-6)
    assert float(sums.correct_per_slot.sum()) == matches


def test_norms_follow_the_kind_unless_named():
    assert [LossRule(kind).divides_by for kind in ("decay", "dpace")] == ["weights", "rows"]
    args = batch()
    for kind in ("decay", "dpace"):
        found = {norm: dflash_loss(*args, LossRule(kind, 4.0, norm=norm), 7).weight for norm in ("rows", "slots")}
        assert (float(found["rows"]), float(found["slots"])) == (2, float(slot_targets(*args[2:], K).counted.sum()))


@pytest.mark.parametrize(("kind", "labels"), [("decay", "target"), ("decay", "argmax"), ("dpace", "argmax")])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_gradient_is_autograds_whatever_the_chunk(kind, labels, chunk):
    hidden, head, ids, mask, positions, valid = batch()
    rule = LossRule(kind, 4.0, labels=labels)
    ours = hidden.clone().requires_grad_()
    dflash_loss(ours, head, ids, mask, positions, valid, rule, chunk, states()).loss.backward()
    theirs = hidden.clone().requires_grad_()
    counted = slot_targets(ids, mask, positions, valid, K).counted
    before = (positions.long()[..., None] + torch.arange(K - 1)).clamp(max=S - 1)
    own = (states() @ head.T).log_softmax(-1)[torch.arange(R)[:, None, None], before]
    drafted = (theirs[:, :, 1:] @ head.T).log_softmax(-1)
    if labels == "target":
        loss = (own.exp() * (own - drafted)).sum(-1)
    else:
        loss = -drafted.gather(-1, own.argmax(-1, keepdim=True))[..., 0]
    (slot_weights(counted, loss.detach(), rule) * loss).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_drafter_that_is_the_target_has_no_divergence():
    _, head, ids, mask, positions, valid = batch()
    before = (positions.long()[..., None] + torch.arange(-1, K - 1)).clamp(0, S - 1)
    hidden = states()[torch.arange(R)[:, None, None], before]
    sums = dflash_loss(hidden, head, ids, mask, positions, valid, LossRule(labels="target"), 64, states())
    assert abs(float(sums.loss)) < 1e-4 and torch.equal(sums.correct_per_slot, sums.counted_per_slot)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5_text", "gemma3_text", "starcoder2"])
@pytest.mark.parametrize("forward", ["auto", "module"])
def test_the_final_states_give_the_targets_own_logits(tmp_path, family, forward):
    model = load_model(write_target(tmp_path, family), torch.float32, CPU)
    target = Target(model, (1, 3), 40, forward, final=True)
    target.check_against_module()
    ids = torch.randint(90, (2, 40), generator=torch.Generator().manual_seed(0))
    taps = torch.full((2, 40, target.taps_size), float("nan"))
    target.extract(ids, taps)
    size = target.config.hidden_size
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(taps[..., -size:] @ target.lm_head.T, logits, rtol=1e-3, atol=1e-4)
    without = torch.empty(2, 40, 2 * size)
    Target(model, (1, 3), 40, forward).extract(ids, without)
    torch.testing.assert_close(taps[..., : 2 * size], without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("labels", ["target", "argmax"])
def test_a_run_learns_what_the_target_says(tmp_path, labels):
    changes = {"run": {"steps": 80}, "optim": {"lr": 1e-2, "accumulate": 1}}
    changes["drafter"] = {"labels": labels, "loss_norm": "slots"}
    profile = tiny_profile(tmp_path, rows=[(30, list(range(8, 30)))] * 2, **changes)
    summary = train(profile, tmp_path / "run", False, Console(quiet=True))
    assert summary["loss_last"] < 0.9 * summary["loss_first"]


def test_target_labels_are_counted_in_the_plan(tmp_path):
    data, own = (make_plan(tiny_profile(tmp_path, drafter={"labels": labels})) for labels in ("data", "target"))
    assert own.taps_size == data.taps_size + own.shape.hidden_size
    assert own.flops.head_parameters == 1.5 * data.flops.head_parameters
    assert own.flops.target_parameters == 6 / 4 * data.flops.target_parameters


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r'write drafter\.labels = "argmax"'):
        tiny_profile(tmp_path, drafter={"labels": "target", "loss": "dpace"})
    with pytest.raises(UsageError, match="final_logit_softcapping"):
        build(make_plan(tiny_profile(tmp_path, "gemma2", drafter={"labels": "target"})))
