"""Judges one row: the tokens and mask that go into a shard, or why none do.

Promises: a row longer than max_context is cut at its end; a row that could not train anything is skipped, never mended.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draftgraph.engine.data import doctor as reasons
from draftgraph.engine.data.anchors import valid_anchors
from draftgraph.engine.data.formats import Row, Tokens, Trouble
from draftgraph.engine.data.masks import TemplateRefusal
from draftgraph.engine.data.template import Template


class Kept(NamedTuple):
    input_ids: np.ndarray  # [n] int64
    loss_mask: np.ndarray  # [n] bool
    tokens_cut: int


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
            return self._judge(row.input_ids, row.loss_mask)
        try:
            ids, mask = self._template.encode(row)
        except TemplateRefusal as refusal:
            return Skipped(reasons.REFUSED, str(refusal))
        return self._judge(np.array(ids, dtype=np.int64), np.array(mask, dtype=bool))

    def _judge(self, ids: np.ndarray, mask: np.ndarray) -> Kept | Skipped:
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
        return Kept(ids, mask, length - len(ids))
