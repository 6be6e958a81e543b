"""Evaluation inside a run: real acceptance on a few held-out prompts, by the graphs that warm-up captured.

Promises: nothing is allocated or captured after warm-up, and nothing that trains is written: a run with it trains the
bits of a run without. It decodes on the first target's device, where the whole model is; a drafter on another device is
copied there before each evaluation. The host waits asleep until the evaluation is done.
Does not: compare with plain decoding; `draftgraph eval` does.
"""

from pathlib import Path

import torch
from torch import Tensor

from draftgraph.engine.data.prompts import load_prompts
from draftgraph.engine.errors import DataError, UsageError
from draftgraph.engine.evaluate import encode_prompt, stop_tokens
from draftgraph.engine.models.cached_drafter import CachedDrafter
from draftgraph.engine.models.cached_target import CachedTarget
from draftgraph.engine.models.drafter import Drafter
from draftgraph.engine.models.target import Target, load_tokenizer
from draftgraph.engine.plan import Plan
from draftgraph.engine.run.decoding import DecodeLane, chunks_of, slots_for
from draftgraph.engine.run.lanes import DrafterLane
from draftgraph.engine.run.metrics import LateFigures, RealAcceptance
from draftgraph.engine.run.streams import Event, on, phase
from draftgraph.profiles.load import DATA


class HeldOut:
    """Prompts [S] each, decoded with the first drafter's present weights.

    Raises:
        CaptureError: the target cannot be decoded over static caches.
    Owns: a lane, caches for all prompts, and a copy of the drafter where it trains on another device.
    """

    def __init__(self, plan: Plan, prompts: list[Tensor], target: Target, lead: DrafterLane):
        section, shape = plan.profile.eval, plan.shape
        self.every, self.last_step, self.lead = section.every, plan.profile.run.steps, lead
        num_rows = len(prompts)
        slots = slots_for(max(map(len, prompts)), section.new_tokens, shape.block_size)
        cached = CachedTarget(target.model, shape.target_layer_ids, num_rows, slots)
        cached.check_against_module()
        self.far = lead.device != target.device
        trained = lead.drafter
        if self.far:
            with target.device:
                trained = Drafter(shape, 1).to(target.dtype)
        drafter = CachedDrafter(trained, target.embedding, target.lm_head, num_rows, slots)
        self.pairs = list(zip(drafter.drafter.parameters(), lead.drafter.parameters(), strict=True))
        assert self.far or all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in self.pairs)
        stops = sorted(stop_tokens(target.model, load_tokenizer(plan.profile.target.model))) if section.prompts else []
        self.decoder = DecodeLane("eval", cached, drafter, stops, plan.profile.capture.mode, one_token=False)
        self.start = self.decoder.start(prompts, section.new_tokens)
        self.num_chunks, self.num_rounds = chunks_of(prompts), section.new_tokens - 1
        self.updated = Event(lead.device)
        self.late = LateFigures(num_rows * shape.block_size, target.device, depth=1)

    def due(self, step: int) -> bool:
        """After which steps: every so many, and the last."""
        return step % self.every == 0 or step == self.last_step

    def await_steps(self) -> None:
        """Wait asleep for the steps that were issued: their time is not the evaluation's."""
        self.updated.record(self.lead.lane.stream)
        self.updated.wait()

    @torch.no_grad()
    def measure(self, step: int) -> RealAcceptance:
        """Decode all prompts with the weights of `step`, which was issued in full."""
        lane, lead = self.decoder.lane, self.lead.lane
        with phase(lane, "evaluation"):
            if self.far:
                # NOTE: a copy between devices goes by the current streams of both.
                with on(lane.stream), on(lead.stream):
                    for ours, theirs in self.pairs:
                        ours.copy_(theirs, non_blocking=True)
            self.updated.record(lead.stream)
            self.updated.hold(lane.stream)
            self.decoder.issue(self.start, self.num_chunks, self.num_rounds)
            self.late.publish(step, self.decoder.rows.counts.view(-1), lane.stream)
            [(_, counts)] = self.late.finished(wait=True)
        size = self.lead.drafter.shape.block_size
        return RealAcceptance.of([sum(counts[k::size]) for k in range(size)])


def prompts_of(plan: Plan) -> list[Tensor]:
    """The prompts [S] of [eval]: of its file, or the beginnings of the data's first rows.

    Raises:
        UsageError: the file cannot be read, or answers are too long. DataError: it, or the data, holds none.
    """
    section = plan.profile.eval
    if section.prompts:
        path = Path(section.prompts)
        if not path.is_file() and path.name == section.prompts and (DATA / path.name).is_file():
            path = DATA / path.name  # a bare name: a shipped file
        texts, tokenizer = load_prompts(str(path), section.count), load_tokenizer(plan.profile.target.model)
        return fitting(plan, [encode_prompt(tokenizer, text) for text in texts])
    found: list[Tensor] = []
    for row in range(len(plan.rows)):
        ids, supervised = plan.rows[row]
        # Up to where the first supervised answer begins.
        if length := int(supervised.argmax()):
            found.append(torch.from_numpy(ids[:length].astype("int64")))
        if len(found) == section.count:
            break
    if not found:
        raise DataError("eval.prompts: no row of the data begins with tokens that are not supervised; name a file")
    return fitting(plan, found)


def fitting(plan: Plan, prompts: list[Tensor]) -> list[Tensor]:
    """The prompts, where the target has positions for their answers."""
    longest, new_tokens = max(map(len, prompts)), plan.profile.eval.new_tokens
    most = getattr(plan.target_config, "max_position_embeddings", None)
    if most and longest + new_tokens > most:
        raise UsageError(
            f"profile: eval.new_tokens = {new_tokens} behind a prompt of {longest} tokens is more than the target's "
            f"{most} positions; write {most - longest} or less, or shorter prompts"
        )
    return prompts
