"""Anchors of a row: which tokens may start a draft block, and the draw of some of them.

Promises: the draw depends on (seed, epoch, row, repeat) and the row's mask alone, never on the bucket table, the batch
or the process that draws. Runs on the host, in numpy; no generator lives in a graph.
"""

from dataclasses import dataclass

import numpy as np

from draftgraph.engine.errors import DataError

RULES = ("next-supervised", "in-row")


def valid_anchors(loss_mask: np.ndarray, rule: str, block_size: int) -> np.ndarray:
    """Say for each token of one row whether it may be an anchor.

    Args:
        loss_mask: [S] bool. True where the token is supervised.
        rule: `next-supervised`: m[a] and m[a+1]; `in-row`: m[a] and a <= S-K.
        block_size: K, tokens.
    Returns:
        valid [S] bool.
    """
    eligible = _eligible(loss_mask, rule)
    eligible[max(0, len(loss_mask) - _tail(rule, block_size)) :] = False
    return eligible


def count_valid_anchors(loss_mask: np.ndarray, offsets: np.ndarray, rule: str, block_size: int) -> np.ndarray:
    """Count the valid anchors of many rows laid end to end.

    Args:
        loss_mask: [tokens] bool, all rows.
        offsets: [rows + 1] int64, where each row starts and the last one ends.
        rule: as in `valid_anchors`.
        block_size: K, tokens.
    Returns:
        counts [rows] int64.
    """
    before = np.concatenate([[0], np.cumsum(_eligible(loss_mask, rule), dtype=np.int64)])
    starts = offsets[:-1]
    stops = np.maximum(starts, offsets[1:] - _tail(rule, block_size))
    return before[stops] - before[starts]


def choose_anchors(
    loss_mask: np.ndarray, num_anchors: int, draw_size: int, block_size: int, rule: str, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Choose min(draw_size, valid) anchors of one row, in a fixed number of slots.

    Args:
        loss_mask: [S] bool, the row without its pads.
        num_anchors: A, set by the bucket, never by the data.
        draw_size: the most anchors any row may have; set by the profile, the same for all buckets.
        block_size: K, tokens.
        rule: as in `valid_anchors`.
        generator: the only source of randomness.
    Returns:
        anchor_positions [A] int32, ascending, 0 in pad slots; anchor_valid [A] bool.
    Raises:
        DataError: the bucket has fewer slots than the row has anchors.
    Source: DFlash paper, training; differs in that A is constant.
    """
    candidates = np.flatnonzero(valid_anchors(loss_mask, rule, block_size))
    drawn = min(draw_size, len(candidates))
    if drawn > num_anchors:
        raise DataError(
            f"a row draws {drawn} anchors and its bucket has {num_anchors} slots; assign rows by the same anchor rule"
        )
    if drawn < len(candidates):
        candidates = np.sort(generator.choice(candidates, drawn, replace=False, shuffle=False))
    positions = np.zeros(num_anchors, dtype=np.int32)
    positions[:drawn] = candidates
    return positions, np.arange(num_anchors) < drawn


@dataclass(frozen=True)
class AnchorDraw:
    """How a run draws anchors: all that the draw of a row depends on besides the row."""

    seed: int
    num_anchors: int  # the most per row
    block_size: int
    rule: str = "next-supervised"

    def draw(
        self, loss_mask: np.ndarray, num_anchors: int, *, epoch: int, row: int, repeat: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a row's anchors into A = `num_anchors` slots, as `choose_anchors` does."""
        generator = np.random.default_rng([self.seed, epoch, row, repeat])
        return choose_anchors(loss_mask, num_anchors, self.num_anchors, self.block_size, self.rule, generator)


def _eligible(loss_mask: np.ndarray, rule: str) -> np.ndarray:
    assert rule in RULES, rule
    eligible = np.array(loss_mask, dtype=bool)
    if rule == "next-supervised":
        eligible[:-1] &= eligible[1:]
    return eligible


def _tail(rule: str, block_size: int) -> int:
    """How many tokens at the end of a row can never be anchors."""
    return 1 if rule == "next-supervised" else block_size - 1
