"""What a drafter is worth: acceptance length by real speculative decoding of prompts, beside plain decoding.

Promises: every greedy answer is compared token for token with the target's own; sums are pooled over prompts, so a long
answer counts more than a short one. The bonus token is counted: a useless drafter has an acceptance length of 1. On a
GPU every step is a captured graph that was verified against its eager run; on the CPU the same steps run eagerly.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from draftgraph.capture.errors import CaptureFailure, DeviceMemoryExhausted
from draftgraph.capture.verify import compare, eager_references
from draftgraph.engine.data.prompts import render_prompt
from draftgraph.engine.errors import CaptureError
from draftgraph.engine.models.cached_drafter import CachedDrafter
from draftgraph.engine.models.cached_target import CachedTarget
from draftgraph.engine.models.drafter import Drafter, DrafterShape
from draftgraph.engine.progress import progress_bar
from draftgraph.engine.run.decoding import DecodeLane, slots_for
from draftgraph.engine.run.metrics import RealAcceptance
from draftgraph.engine.run.tree_decoding import TreeLane

MOST_DIFFERENCES = 10  # that a summary names


def encode_prompt(tokenizer: Any, prompt: str) -> Tensor:
    """Token ids [S] of the prompt as a user's turn, up to where the answer starts."""
    # The template wrote the special tokens already.
    return torch.tensor(tokenizer(render_prompt(tokenizer, prompt), add_special_tokens=False)["input_ids"])


def stop_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Where an answer ends: the model's own end tokens and the tokenizer's."""
    own: Any = getattr(model, "generation_config", None)
    ends = [tokenizer.eos_token_id, getattr(own, "eos_token_id", None)]
    flat = [token for end in ends for token in (end if isinstance(end, list) else [end])]
    return frozenset(token for token in flat if token is not None)


@dataclass(frozen=True)
class Question:
    """One prompt; `index` counts within its set."""

    set_name: str
    index: int
    ids: Tensor


@dataclass
class Answers:
    """The answers of one way to decode, in the order of the questions, and the seconds of each batch's rows."""

    tokens: list[list[int]]
    counts: list[list[float]]
    seconds: list[float]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / sum(self.seconds)


class Evaluation:
    """Prompts of a target, decoded plainly once, and speculatively with each drafter that is measured.

    Args:
        model: the target, a causal LM of transformers.
        shape: of the drafters.
        sets: name -> texts, each one user turn; at least one.
        new_tokens: of an answer, at most.
        batch_size: rows decoded together.
        temperature: 0 is greedy.
        tree_budget: nodes of a tree of drafts, which is decoded with beside the chain; 0: no trees.
        console: for the bars; None: no bar.
    Raises:
        CaptureError: the target's family cannot be decoded over static caches. UsageError: nor its states with trees.
    Owns: caches for batch_size rows, and the graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        shape: DrafterShape,
        sets: Mapping[str, Sequence[str]],
        *,
        new_tokens: int,
        batch_size: int,
        temperature: float = 0.0,
        tree_budget: int = 0,
        console: Console | None = None,
    ):
        self.new_tokens, self.temperature, self.console = new_tokens, temperature, console
        self.questions = [
            Question(name, index, encode_prompt(tokenizer, text))
            for name, texts in sets.items()
            for index, text in enumerate(texts)
        ]
        # Rows of like length share a batch, so that few chunks are pads.
        by_length = sorted(range(len(self.questions)), key=lambda i: len(self.questions[i].ids))
        self.batches = [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
        longest = max(len(question.ids) for question in self.questions)
        num_rows, slots = min(batch_size, len(by_length)), slots_for(longest, new_tokens, shape.block_size, tree_budget)
        target = CachedTarget(model, shape.target_layer_ids, num_rows, slots)
        target.check_against_module()
        with target.device:
            drafter = Drafter(shape, 1).to(target.dtype)
        embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight  # type: ignore
        mode = "graph" if target.device.type == "cuda" else "eager"
        stops = sorted(stop_tokens(model, tokenizer))
        cached = CachedDrafter(drafter, embedding, lm_head, num_rows, slots)
        self.decoder: DecodeLane
        if tree_budget:
            self.decoder = TreeLane(tree_budget, "eval", target, cached, stops, mode)
        else:
            self.decoder = DecodeLane("eval", target, cached, stops, mode, temperature)
        self.exact = target.dtype == torch.float32 and not temperature
        self.plain: Answers | None = None
        # Of greedy answers, by the step that verifies: one token at a time in its shapes.
        self.references: dict[str, Answers] = {}
        self.tree_budget = tree_budget
        ready(self.decoder)

    def measure(self, drafter: Drafter) -> dict[str, Any]:
        """The summary of `eval` for a drafter on any device.

        Returns:
            acceptance, acceptance_per_slot (K-1 shares of the verify forwards), prompts, identical_to_greedy (None for
            sampled answers), tokens_per_s, tokens_per_s_plain (answer tokens over seconds, the prompts' forwards
            included); `sets`, the same for each set of prompts; `different_from_one_token`, how many answers differ
            from ordinary decoding, and `first_differences`; with trees `tree`, the same for them, and
            `tree_over_chain`, the acceptance of one over the other. What no forward measured is None.
        """
        if self.plain is None:
            self.plain = self.answers("plain decoding", "one")
        self.decoder.drafter.drafter.load_state_dict(drafter.state_dict())
        summary = {
            **self.speculate("verify", "speculative decoding"),
            "tokens_per_s_plain": self.plain.tokens_per_s,
            "batch_size": self.decoder.target.num_rows,
            "temperature": self.temperature,
        }
        if self.tree_budget:
            tree = self.speculate("verify tree", "speculative decoding of trees")
            summary["tree"] = {"budget": self.tree_budget, **tree}
            both = summary["acceptance"] and tree["acceptance"]
            summary["tree_over_chain"] = tree["acceptance"] / summary["acceptance"] if both else None
        return summary

    def speculate(self, step: str, what: str) -> dict[str, Any]:
        """Figures of all questions and of each set, for drafts that `step` verifies."""
        assert self.plain is not None
        found, everything = self.answers(what, step), range(len(self.questions))
        reference, differences = None, []
        if not self.temperature:
            reference, differences = self.reference(step), self.differences(found, self.plain)
        names = dict.fromkeys(question.set_name for question in self.questions)
        sets = {name: [i for i in everything if self.questions[i].set_name == name] for name in names}
        return {
            **self.figures(found, list(everything), reference),
            "tokens_per_s": found.tokens_per_s,
            "sets": [{"name": name, **self.figures(found, members, reference)} for name, members in sets.items()],
            "different_from_one_token": None if self.temperature else len(differences),
            "first_differences": differences[:MOST_DIFFERENCES],
        }

    def reference(self, step: str) -> Answers:
        """Plain answers; in bfloat16, where another shape may round a tie differently, in the shapes of `step`."""
        assert self.plain is not None
        if step not in self.references:
            shaped = None if self.exact else self.answers("plain decoding in the shapes of drafts", step, emit_one=True)
            self.references[step] = shaped or self.plain
        return self.references[step]

    def figures(self, found: Answers, members: list[int], reference: Answers | None) -> dict[str, Any]:
        """Of some of the questions."""
        counts = [sum(column) for column in zip(*(found.counts[i] for i in members), strict=True)]
        same = None if reference is None else all(found.tokens[i] == reference.tokens[i] for i in members)
        return {
            **asdict(RealAcceptance.of(counts)),
            "prompts": len(members),
            "tokens": sum(len(found.tokens[i]) for i in members),
            "identical_to_greedy": same,
        }

    def differences(self, found: Answers, plain: Answers) -> list[dict[str, Any]]:
        """Where answers leave ordinary decoding."""
        different = []
        for question, ours, theirs in zip(self.questions, found.tokens, plain.tokens, strict=True):
            if ours != theirs:
                pairs = enumerate(zip(ours, theirs, strict=False))
                position = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
                different.append({"set": question.set_name, "prompt": question.index, "token": position})
        return different

    def answers(self, what: str, step: str, emit_one: bool = False) -> Answers:
        """Decode all questions in one way."""
        empty = [[] for _ in self.questions]  # type: ignore[var-annotated]
        found, decoder = Answers(list(empty), list(empty), []), self.decoder
        decoder.generator.manual_seed(0)
        with progress_bar(self.console, disable=self.console is None) as bar:
            task = bar.add_task(what, total=len(self.questions))
            for batch in self.batches:
                start = decoder.start([self.questions[i].ids for i in batch], self.new_tokens)
                decoder.lane.synchronize()
                started = time.perf_counter()
                decoder.answer(start, step, emit_one)
                decoder.lane.synchronize()
                found.seconds.append(time.perf_counter() - started)
                for row, i in enumerate(batch):
                    found.tokens[i], found.counts[i] = decoder.rows.answer(row), decoder.rows.counts[row].tolist()
                forwards, *accepted = (sum(column) for column in zip(*filter(None, found.counts), strict=True))
                text = f"{what}, acceptance {1 + sum(accepted) / forwards:.3f}" if forwards and not emit_one else what
                bar.update(task, advance=len(batch), description=text)
        return found

    def close(self) -> None:
        self.decoder.lane.close()


def ready(decoder: DecodeLane) -> None:
    """Warm up; on a GPU, capture and verify as well.

    Raises:
        CaptureError: a step does not fit, or cannot be captured.
    """
    lane = decoder.lane
    try:
        lane.warm_up(3 if lane.mode == "graph" else 1)
        references = eager_references([lane]) if lane.mode == "graph" else None
        lane.capture()
        if references is not None:
            compare([lane], references)
    except DeviceMemoryExhausted as failure:
        raise CaptureError(f"{failure}. Decode fewer prompts at once (--batch-size)") from failure
    except CaptureFailure as failure:
        raise CaptureError(str(failure)) from failure
