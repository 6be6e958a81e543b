"""A lane that decodes: a batch of rows, each at its own position, over static caches of the target and the drafter.

Its steps: `prefill` (a chunk of the prompts), `draft` (a block of every row), `verify` (the block in one forward of the
target, what is accepted, the caches brought up to it) and `one` (ordinary decoding). All that is decided is decided on
the device: the host only learns, late, whether every row is done.

What is counted. A verify forward emits the drafts that it accepts and one token more, the target's own (the bonus
token): 1 to K tokens. The prompt's forwards and their one token are counted nowhere. Tokens after a stop token or
beyond a row's limit are neither kept nor counted: a forward that emitted n tokens accepted n - 1 drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftgraph.capture.lane import Lane
from draftgraph.capture.step import Step
from draftgraph.engine.models.cached_drafter import CachedDrafter
from draftgraph.engine.models.cached_target import CachedTarget
from draftgraph.engine.models.speculation import draw, probabilities, verify_greedily, verify_sampled
from draftgraph.engine.run.lanes import random_fill
from draftgraph.engine.run.metrics import LateFigures

CHUNK = 64  # prompt tokens of a row in one forward
IN_FLIGHT = 3  # rounds that are issued before the host looks whether the first of them was the last


@dataclass(frozen=True)
class Rows:
    """Where every row is. All of it on the device."""

    tokens: Tensor  # [R, slots] int64, prompt and answer
    num_prompt: Tensor  # [R] int64
    filled: Tensor  # [R] int64, prompt tokens that the caches hold
    length: Tensor  # [R] int64, known tokens; the newest is not in the caches yet
    limit: Tensor  # [R] int64, the length at which a row ends
    done: Tensor  # [R] bool
    counts: Tensor  # [R, K] float32: verify forwards, then those that accepted the draft of slot 1, 2, ...

    @staticmethod
    def of(prompts: Sequence[Tensor], num_rows: int, num_slots: int, block_size: int, new_tokens: int) -> "Rows":
        """Before the first forward, on the CPU; rows without a prompt are done from the start."""
        lengths = torch.tensor([len(prompt) for prompt in prompts] + [1] * (num_rows - len(prompts)))
        tokens = torch.zeros(num_rows, num_slots, dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[: len(prompt)] = prompt
        return Rows(
            tokens=tokens,
            num_prompt=lengths,
            filled=torch.zeros_like(lengths),
            length=lengths.clone(),
            limit=lengths + new_tokens,
            done=torch.arange(num_rows) >= len(prompts),
            counts=torch.zeros(num_rows, block_size),
        )

    def to(self, device: torch.device) -> "Rows":
        return Rows(**{name: tensor.to(device) for name, tensor in self.named().items()})

    def named(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def copy_(self, other: "Rows") -> None:
        for name, tensor in self.named().items():
            tensor.copy_(getattr(other, name))

    def answer(self, row: int) -> list[int]:
        return self.tokens[row, int(self.num_prompt[row]) : int(self.length[row])].tolist()


def chunks_of(prompts: Sequence[Tensor]) -> int:
    """Forwards that fill the caches with the longest of the prompts."""
    return -(-max(map(len, prompts)) // CHUNK)


def slots_for(longest_prompt: int, new_tokens: int, block_size: int, budget: int = 0) -> int:
    """Slots of a row: beyond its prompt is room for its answer and a block or tree, and for the pads of a chunk."""
    return -(-(longest_prompt + max(new_tokens, CHUNK) + block_size + budget) // 64) * 64


class DecodeLane:
    """Owns: the rows' state. The caches are those of `target` and `drafter`, for as many rows and slots.

    Args:
        stops: where an answer ends.
        temperature: 0 is greedy.
        one_token: with the step of ordinary decoding.
    """

    def __init__(
        self,
        name: str,
        target: CachedTarget,
        drafter: CachedDrafter,
        stops: Sequence[int],
        mode: str,
        temperature: float = 0.0,
        one_token: bool = True,
    ):
        self.target, self.drafter, self.temperature = target, drafter, temperature
        self.block_size, num_rows, device = drafter.shape.block_size, target.num_rows, target.device
        self.rows = Rows.of([], num_rows, len(target.slots), self.block_size, 0).to(device)
        self.block = torch.zeros(num_rows, self.block_size, dtype=torch.int64, device=device)
        # The most that a verify forward may emit: K, or 1 for a reference in its shapes.
        self.most = torch.full((), self.block_size, dtype=torch.int64, device=device)
        self.unfinished = torch.ones(1, device=device)
        self.uniform = torch.zeros(num_rows, 2 * self.block_size, device=device)
        vocab = target.config.vocab_size
        self.drafted = torch.zeros(num_rows, self.block_size - 1, vocab if temperature else 0, device=device)
        self.stops = torch.tensor(sorted(stops) or [-1], device=device)
        self.room = CHUNK + self.block_size  # slots behind a row's position that a step may write
        self.generator = torch.Generator(device).manual_seed(0)
        self.lane = Lane(name, device, mode)  # type: ignore[arg-type]
        self.late = LateFigures(1, device, IN_FLIGHT)
        for step, run, tokens, logits in (
            ("prefill", self.prefill, CHUNK, 1),
            ("verify", self.verify, self.block_size, self.block_size),
            ("draft", self.draft, 0, self.block_size - 1),
            *([("one", self.one, 1, 1)] if one_token else []),
        ):
            self.lane.add(self.step(step, run, tokens, logits))

    # What is captured.

    @torch.no_grad()
    def prefill(self) -> None:
        """The next chunk of every prompt; the row whose prompt ends with it gets its first token."""
        rows = self.rows
        positions = rows.filled[:, None] + torch.arange(CHUNK, device=self.target.device)
        kept = (rows.num_prompt - rows.filled).clamp(0, CHUNK)
        hidden = self.forward(rows.tokens.gather(1, positions), positions, kept)
        last = (kept - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        logits = self.target.logits(hidden.gather(1, last))[:, 0]
        if self.temperature:
            first = draw(probabilities(logits, self.temperature), self.uniform[:, -1])
        else:
            first = logits.argmax(-1)
        rows.filled.add_(kept)
        ends = (kept > 0) & (rows.filled == rows.num_prompt) & ~rows.done
        self.emit(first[:, None], ends.long())

    @torch.no_grad()
    def draft(self) -> None:
        logits = self.drafter.logits(*self.newest())
        if self.temperature:
            self.drafted.copy_(probabilities(logits, self.temperature))
            self.block[:, 1:] = draw(self.drafted, self.uniform[:, : self.block_size - 1])
        else:
            self.block[:, 1:] = logits.argmax(-1)

    @torch.no_grad()
    def verify(self) -> None:
        self.block[:, 0] = self.newest()[0]
        self.advance(self.block, self.drafted)

    @torch.no_grad()
    def one(self) -> None:
        self.advance(self.newest()[0][:, None], self.drafted[:, :0])

    def advance(self, block: Tensor, drafted: Tensor) -> None:
        """Run a block [R, n], keep what is accepted of it, and say the next token."""
        rows, n = self.rows, block.shape[1]
        positions = (rows.length - 1)[:, None] + torch.arange(n, device=block.device)
        hidden, taps = self.target.forward(block, positions)
        logits = self.target.logits(hidden)
        if self.temperature:
            uniform = self.uniform[:, self.block_size : self.block_size + n]
            tokens, accepted = verify_sampled(block, logits, drafted, uniform, self.temperature)
        else:
            tokens, accepted = verify_greedily(block, logits)
        num = self.settle(tokens, accepted)
        self.target.commit(num)
        if n == self.block_size:
            self.drafter.append(taps, positions)
        self.emit(tokens, num)

    def settle(self, tokens: Tensor, accepted: Tensor) -> Tensor:
        """How many of what was said [R, n] a row emits, [R], and its figures.

        Args:
            accepted: [R], how many of them are drafts; the one behind them is right as well.
        """
        rows, n = self.rows, tokens.shape[1]
        num = (accepted + 1).minimum(self.most).minimum(rows.limit - rows.length)
        ending = self.stop(tokens)
        before = torch.where(ending.any(1), ending.long().argmax(1) + 1, n)
        num = torch.where(rows.done, 0, num.minimum(before))
        if n == self.block_size:
            slots = torch.arange(n - 1, device=tokens.device)
            rows.counts[:, 0] += (num > 0).float()
            rows.counts[:, 1:] += (slots < (num - 1)[:, None]).float()
        return num

    def forward(self, tokens: Tensor, positions: Tensor, kept: Tensor) -> Tensor:
        """Run tokens of which `kept` are known to stay, and remember them."""
        hidden, taps = self.target.forward(tokens, positions, kept=kept)
        self.drafter.append(taps, positions)
        return hidden

    def emit(self, tokens: Tensor, num: Tensor) -> None:
        """Write the first num [R] of tokens [R, n] behind what a row knows."""
        rows = self.rows
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        where = rows.length[:, None] + slots
        new = torch.where(slots < num[:, None], tokens, rows.tokens.gather(1, where))
        rows.tokens.scatter_(1, where, new)
        rows.length.add_(num)
        rows.done.logical_or_((num > 0) & (self.stop(self.newest()[0]) | (rows.length >= rows.limit)))
        self.unfinished.copy_((~rows.done).any()[None])

    def newest(self) -> tuple[Tensor, Tensor]:
        """Every row's newest token and its position, [R]."""
        start = self.rows.length - 1
        return self.rows.tokens.gather(1, start[:, None])[:, 0], start

    def stop(self, tokens: Tensor) -> Tensor:
        return (tokens[..., None] == self.stops).any(-1)

    # What issues it.

    def start(self, prompts: Sequence[Tensor], new_tokens: int) -> Rows:
        """At most as many prompts [S] as there are rows, before their first forward."""
        num_rows, slots = self.rows.tokens.shape
        return Rows.of(prompts, num_rows, slots, self.block_size, new_tokens).to(self.rows.tokens.device)

    def answer(self, rows: Rows, step: str = "verify", emit_one: bool = False) -> None:
        """Decode all rows to their end, on the lane's stream; the host waits asleep, a few rounds behind.

        Args:
            rows: the start, on the device.
            step: "verify", or "one" for ordinary decoding.
            emit_one: every verify forward emits one token: plain decoding in the shapes of a verify forward.
        """
        num_prompt, limit = int(rows.num_prompt.max()), int((rows.limit - rows.num_prompt).max())
        self.issue(rows, -(-num_prompt // CHUNK), limit - 1, step, emit_one)

    def issue(self, rows: Rows, num_chunks: int, num_rounds: int, step: str = "verify", emit_one: bool = False) -> None:
        with self.lane.on_stream():
            self.rows.copy_(rows)
            self.most.fill_(1 if emit_one else self.block_size)
            self.target.reset()
        for _ in range(num_chunks):
            self.shake()
            self.lane.replay("prefill")
        going = True
        for number in range(num_rounds):
            self.shake()
            if not emit_one and (drafts := self.drafts(step)):
                self.lane.replay(drafts)
            self.lane.replay(step)
            self.late.publish(number, self.unfinished, self.lane.stream)
            going = all(unfinished for _, (unfinished,) in self.late.finished())
            if not going:
                break
        self.late.finished(wait=True)

    def drafts(self, step: str) -> str:
        """The step that drafts what `step` verifies; empty for ordinary decoding."""
        return "draft" if step == "verify" else ""

    def shake(self) -> None:
        """Fresh randomness for one round; outside the graphs, which hold no generator."""
        if self.temperature:
            with self.lane.on_stream():
                self.uniform.uniform_(generator=self.generator)

    # What verifies it.

    def step(self, name: str, run: Callable[[], None], num_tokens: int, num_logits: int) -> Step:
        """A step in which a row takes so many tokens through the target's layers, and so many rows of logits."""
        config = self.target.config
        width = 4 * (config.hidden_size + getattr(config, "intermediate_size", 4 * config.hidden_size))
        return Step(
            step=name,
            bucket="",
            run=run,
            inputs=self.inputs(),
            outputs={**self.written(), **self.target.tensors, **self.drafter.tensors},
            fill=self.fill,
            # Logits take memory when the activations of the layers have left it.
            predicted_bytes=self.target.num_rows * max(num_tokens * width, num_logits * config.vocab_size),
        )

    def written(self) -> dict[str, Tensor]:
        """What a step writes beside the caches."""
        return {
            **self.rows.named(),
            "block": self.block,
            "unfinished": self.unfinished,
            "drafted": self.drafted,
        }

    def inputs(self) -> dict[str, Tensor]:
        """What is guarded: all but the caches, which nobody else holds."""
        weights = {"embedding": self.drafter.embedding, "lm_head": self.drafter.lm_head}
        return {**self.written(), **weights, "fc": self.drafter.drafter.fc.weight, "uniform": self.uniform}

    def fill(self, number: int) -> None:
        """Rows in the middle of their prompts or answers; caches and weights of noise."""
        rows, generator = self.rows, torch.Generator().manual_seed(number)
        R, slots = rows.tokens.shape
        tokens = torch.randint(self.target.config.vocab_size, (R, slots), generator=generator)
        start = Rows.of(list(tokens), R, slots, self.block_size, 0)
        lengths = torch.randint(1, slots - self.room + 1, (R,), generator=generator)
        filled = (lengths - CHUNK // 2).clamp(min=0)
        rows.copy_(Rows(tokens, lengths, filled, lengths, lengths + self.block_size, start.done, start.counts))
        self.block.copy_(torch.randint(self.target.config.vocab_size, self.block.shape, generator=generator))
        self.most.fill_(self.block_size)
        self.unfinished.fill_(1)
        random_fill(self.uniform, number)
        self.uniform.sigmoid_()
        random_fill(self.drafted, number)
        if self.temperature:
            self.drafted.copy_(torch.softmax(self.drafted, -1))
        # The drafter's weights too: where it trains, its own verification writes them.
        weights = dict(self.drafter.drafter.named_parameters())
        for i, tensor in enumerate((self.target.tensors | self.drafter.tensors | weights).values()):
            random_fill(tensor, number + i, std=0.1)
