"""Counts what `prepare` did with every row: used, cut, or skipped and why, with the first few examples of each reason.

Promises: rows_read = rows_used + the sum of rows_skipped. No row is ever left out without a count.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from draftgraph.engine.data.formats import (
    BAD_JSON,
    DAMAGED,
    EMPTY,
    NOT_A_CONVERSATION,
    NOT_UTF8,
    OUT_OF_RANGE,
    TOO_LONG,
)

EXAMPLES = 3
DETAIL = 200  # characters of one line; a detail may quote the row
# Text of another alphabet has some unknown tokens; a wrong tokenizer has many.
UNKNOWN_SHARE = 0.01

ROLES = "roles out of order"
EMPTY_TURN = "empty turn"
REFUSED = "template refused"
SHORT = "shorter than a block"
UNSUPERVISED = "no supervised token"
NO_ANCHOR = "no valid anchor"
DUPLICATE = "duplicate"

ADVICE = {
    BAD_JSON: "the line is not one JSON value",
    NOT_UTF8: "files must be UTF-8; convert the file, or repair the row",
    TOO_LONG: "a row longer than any conversation; is a line break missing?",
    DAMAGED: "rows behind the damage are lost; get the file again",
    NOT_A_CONVERSATION: "the row has none of the known forms, or breaks its own",
    EMPTY: "no messages, no text, or no tokens",
    ROLES: "system comes first, then a user; tool results follow an assistant",
    EMPTY_TURN: "a user or an assistant says nothing",
    REFUSED: "the chat template raised, or cannot show which tokens the assistant wrote",
    OUT_OF_RANGE: "ids must be at least 0 and below the target's vocabulary size",
    SHORT: "fewer tokens than one draft block",
    UNSUPERVISED: "no assistant token within max_context",
    NO_ANCHOR: "supervised, but no token may start a draft block",
    DUPLICATE: "the same tokens as a row before",
}


class Doctor:
    """The counters of one `prepare`."""

    def __init__(self) -> None:
        self.lengths = array("l")  # tokens of each used row
        self.supervised = array("l")
        self.rows_cut = 0
        self.tokens_cut = 0
        self.unknown_tokens = 0
        self.masks: Counter[str] = Counter()  # rows by how their mask was found
        self.left_out: Counter[str] = Counter()  # rows by what the template does not write of them
        self.rows_skipped: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = defaultdict(list)

    @property
    def rows_used(self) -> int:
        return len(self.lengths)

    def use(
        self,
        tokens: int,
        supervised_tokens: int,
        tokens_cut: int,
        unknown_tokens: int,
        found_by: str,
        left_out: Sequence[str],
    ) -> None:
        """Count a row that went into the shards, how many tokens beyond max_context it lost, and how it was read."""
        self.lengths.append(tokens)
        self.supervised.append(supervised_tokens)
        self.rows_cut += tokens_cut > 0
        self.tokens_cut += tokens_cut
        self.unknown_tokens += unknown_tokens
        self.masks[found_by] += 1
        self.left_out.update(left_out)

    def skip(self, reason: str, where: str, detail: str) -> None:
        """Count a row that is left out, and keep it as an example if it is among the first."""
        self.rows_skipped[reason] += 1
        detail = " ".join(detail.split())[:DETAIL]
        if len(self.examples[reason]) < EXAMPLES:
            self.examples[reason].append(f"{where}: {detail}" if detail else where)

    def summary(self) -> dict[str, Any]:
        """The counts as one JSON object."""
        return {
            "rows_read": self.rows_used + self.rows_skipped.total(),
            "rows_used": self.rows_used,
            "rows_skipped": dict(self.rows_skipped.most_common()),
            "rows_cut": self.rows_cut,
            "tokens": sum(self.lengths),
            "tokens_cut": self.tokens_cut,
            "supervised_tokens": sum(self.supervised),
            "unknown_tokens": self.unknown_tokens,
            "masks": dict(self.masks.most_common()),
            "left_out": dict(self.left_out.most_common()),
            "examples": {reason: list(found) for reason, found in self.examples.items()},
        }


def report(summary: dict[str, Any]) -> str:
    """A summary for people: one line a count, then the reasons with their examples, the most frequent first."""
    tokens, unknown = summary["tokens"], summary["unknown_tokens"]
    lines = [
        f"rows: {summary['rows_read']:,} read, {summary['rows_used']:,} used",
        f"tokens: {tokens:,}, {summary['supervised_tokens']:,} supervised",
    ]
    if summary["masks"]:
        lines.append(f"masks found by: {_counts(summary['masks'])}")
    if summary["left_out"]:
        lines.append(f"not written by the chat template: {_counts(summary['left_out'])}")
    if summary["rows_cut"]:
        lines.append(f"cut to max_context: {summary['rows_cut']:,} rows, by {summary['tokens_cut']:,} tokens in all")
    if unknown > UNKNOWN_SHARE * tokens:
        lines.append(f"unknown to the tokenizer: {unknown:,} tokens ({unknown / tokens:.1%}); is it the data's own?")
    for reason, count in summary["rows_skipped"].items():
        lines.append(f"skipped: {count:,} {reason} ({ADVICE[reason]})")
        lines.extend(f"    {example}" for example in summary["examples"][reason])
    return "\n".join(lines)


def _counts(rows: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count:,} row{'s' * (count != 1)})" for name, count in rows.items())
