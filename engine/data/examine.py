"""Judges one row: the tokens and mask that go into a shard, or why none do.

Promises: a row longer than max_context is cut at its end; a row that could not train anything is skipped, never mended.
An Examiner knows one row at a time, in any process; who has seen all rows, in order, is Names.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from draftgraph.engine.data import doctor as reasons
from draftgraph.engine.data.anchors import valid_anchors
from draftgraph.engine.data.formats import Conversation, Row, Tokens, Trouble
from draftgraph.engine.data.masks import TemplateRefusal
from draftgraph.engine.data.template import Template

# What each role may not follow; "" is the start.
MISPLACED = {
    "system": ("system", "user", "assistant", "tool"),
    "user": (),
    "assistant": ("", "system"),
    "tool": ("", "system", "user"),
}

# Names in the set, of some hundred bytes each, before they are sorted into the array.
NEWEST = 2**20


class Kept(NamedTuple):
    input_ids: np.ndarray  # [n] int32
    loss_mask: np.ndarray  # [n] bool
    name: int  # 64 bits of a hash of input_ids
    tokens_cut: int
    unknown_tokens: int
    found_by: str  # how its mask was found, as the report says it
    left_out: Sequence[str]  # what of the row the template does not write


class Skipped(NamedTuple):
    reason: str
    detail: str


@dataclass(frozen=True)
class Rules:
    """What makes a row usable."""

    max_context: int  # longer rows are cut
    block_size: int  # K; shorter rows are left out
    vocab_size: int  # V, the rows of the target's embedding
    anchor_rule: str  # rows without a valid anchor under it are left out


class Examiner:
    """The rules of one `prepare`, applied row by row."""

    def __init__(self, template: Template, rules: Rules) -> None:
        self._template, self._rules = template, rules

    def examine(self, row: Row | Trouble) -> Kept | Skipped:
        """The row as it goes into a shard, or why it does not."""
        if isinstance(row, Trouble):
            return Skipped(row.reason, row.detail)
        if isinstance(row, Tokens):
            return self._judge(row.input_ids, row.loss_mask, "given", [])
        if isinstance(row, Conversation) and (trouble := _turn_trouble(row.messages)):
            return trouble
        try:
            ids, mask, found_by, left_out = self._template.encode(row)
        except TemplateRefusal as refusal:
            return Skipped(reasons.REFUSED, str(refusal))
        return self._judge(ids, mask, found_by, left_out)

    def _judge(self, ids: np.ndarray, mask: np.ndarray, found_by: str, left_out: Sequence[str]) -> Kept | Skipped:
        rules, length = self._rules, len(ids)
        if not length:
            return Skipped(reasons.EMPTY, "no tokens")
        if ids.min() < 0 or ids.max() >= rules.vocab_size:
            return Skipped(reasons.OUT_OF_RANGE, f"ids {ids.min()} to {ids.max()}, vocabulary {rules.vocab_size}")
        if length < rules.block_size:
            return Skipped(reasons.SHORT, f"{length} tokens, block {rules.block_size}")
        ids, mask = ids[: rules.max_context], mask[: rules.max_context]
        if not mask.any():
            return Skipped(reasons.UNSUPERVISED, f"{length} tokens")
        if not valid_anchors(mask, rules.anchor_rule, rules.block_size).any():
            return Skipped(reasons.NO_ANCHOR, f"{int(mask.sum())} supervised of {len(ids)} tokens")
        kept = ids.astype(np.int32)
        unknown = int((ids == self._template.unknown_id).sum())
        return Kept(kept, mask, _name(kept), length - len(ids), unknown, found_by, left_out)


class Names:
    """The rows that were kept, known by their names: 8 bytes each, in one sorted array and a set of the newest.

    Ten million rows meet by chance once in some hundred thousand data sets.
    """

    def __init__(self) -> None:
        self._sorted = np.empty(0, dtype=np.uint64)
        self._newest: set[int] = set()

    def add(self, name: int) -> bool:
        """Whether the name is new."""
        place = int(np.searchsorted(self._sorted, np.uint64(name)))
        if name in self._newest or (place < len(self._sorted) and int(self._sorted[place]) == name):
            return False
        self._newest.add(name)
        if len(self._newest) == NEWEST:
            newest = np.fromiter(self._newest, dtype=np.uint64, count=NEWEST)
            self._sorted = np.sort(np.concatenate([self._sorted, newest]))
            self._newest.clear()
        return True

    def judge(self, found: Kept | Skipped) -> Kept | Skipped:
        """Skip a row with the tokens of one before."""
        if isinstance(found, Skipped) or self.add(found.name):
            return found
        return Skipped(reasons.DUPLICATE, f"{len(found.input_ids)} tokens")


def _name(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


def _turn_trouble(messages: list[dict[str, Any]]) -> Skipped | None:
    """What a template may render all the same, but no conversation means."""
    before = ""
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if before in MISPLACED[role]:
            return Skipped(reasons.ROLES, f"message {number} is the {role}'s, behind {before or 'nothing'}")
        said = message["content"].strip() or message.get("reasoning_content") or message.get("tool_calls")
        if role in ("user", "assistant") and not said:
            return Skipped(reasons.EMPTY_TURN, f"message {number}, the {role}'s")
        before = role
    return None
