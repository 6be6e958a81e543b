"""Counts what `prepare` did with every row: used, cut, or skipped and why, with the first few examples of each reason.

Promises: rows_read = rows_used + the sum of rows_skipped. No row is ever left out without a count.
"""

from collections import Counter, defaultdict
from typing import Any

from rich.table import Table

EXAMPLES = 3

NOT_A_CONVERSATION = "not a conversation"
BAD_JSON = "bad json"
EMPTY = "empty row"
REFUSED = "template refused"
OUT_OF_RANGE = "token ids out of range"
SHORT = "shorter than a block"
UNSUPERVISED = "no supervised token"
NO_ANCHOR = "no valid anchor"

ADVICE = {
    NOT_A_CONVERSATION: "the row has none of the known forms, or breaks its own",
    BAD_JSON: "the line is not one JSON value",
    EMPTY: "no messages, or no tokens",
    REFUSED: "the chat template raised, or cannot show which tokens the assistant wrote",
    OUT_OF_RANGE: "ids must be at least 0 and below the target's vocabulary size",
    SHORT: "fewer tokens than one draft block",
    UNSUPERVISED: "no assistant token within max_context",
    NO_ANCHOR: "supervised, but no token may start a draft block",
}


class Doctor:
    """The counters of one `prepare`."""

    def __init__(self) -> None:
        self.rows_used = 0
        self.rows_cut = 0
        self.tokens = 0
        self.tokens_cut = 0
        self.supervised_tokens = 0
        self.rows_skipped: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = defaultdict(list)

    def use(self, tokens: int, supervised_tokens: int, tokens_cut: int) -> None:
        """Count a row that went into the shards, and how many tokens beyond max_context it lost."""
        self.rows_used += 1
        self.rows_cut += tokens_cut > 0
        self.tokens += tokens
        self.tokens_cut += tokens_cut
        self.supervised_tokens += supervised_tokens

    def skip(self, reason: str, where: str, detail: str) -> None:
        """Count a row that is left out, and keep it as an example if it is among the first."""
        self.rows_skipped[reason] += 1
        if len(self.examples[reason]) < EXAMPLES:
            self.examples[reason].append(f"{where}: {detail}" if detail else where)

    def summary(self) -> dict[str, Any]:
        """The counts as one JSON object."""
        return {
            "rows_read": self.rows_used + self.rows_skipped.total(),
            "rows_used": self.rows_used,
            "rows_skipped": dict(self.rows_skipped.most_common()),
            "rows_cut": self.rows_cut,
            "tokens": self.tokens,
            "tokens_cut": self.tokens_cut,
            "supervised_tokens": self.supervised_tokens,
            "examples": {reason: list(found) for reason, found in self.examples.items()},
        }

    def render(self) -> Table:
        """The counts as a table for people."""
        table = Table(title="Rows", title_justify="left")
        table.add_column("what")
        table.add_column("rows", justify="right")
        table.add_column("tokens", justify="right")
        table.add_column("notes", overflow="fold")
        table.add_row("read", f"{self.rows_used + self.rows_skipped.total():,}", "", "")
        table.add_row(
            "used", f"{self.rows_used:,}", f"{self.tokens:,}", f"{self.supervised_tokens:,} tokens supervised"
        )
        if self.rows_cut:
            table.add_row("cut to max_context", f"{self.rows_cut:,}", f"{self.tokens_cut:,}", "tokens = those cut off")
        for reason, count in self.rows_skipped.most_common():
            # NOTE: escaped by hand: a file name or a template's message may hold rich's markup.
            notes = "\n".join([ADVICE[reason], *self.examples[reason]]).replace("[", r"\[")
            table.add_row(f"skipped: {reason}", f"{count:,}", "", notes)
        return table
