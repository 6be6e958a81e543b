"""The usual GPUs, as their makers' data sheets say, and what of that real steps reach.

Source: NVIDIA's data sheets of the cards named; bf16 is dense with float32 accumulation, links are one direction.
"""

import difflib
from dataclasses import dataclass

from draftgraph.engine.errors import UsageError

# Of a data sheet's FLOP/s. Measured on one H200 (torch 2.11, 2026-11-30): products of 8192 reach 757-786 of 989
# TFLOP/s, fused stacks of 27B shapes 0.73 of that.
REACHED_FLOPS = 0.57
# What products in FP8 make of a target's step at 27B shapes: 646.7 ms in bf16, 389.5 ms, measured on the same H200.
FP8_SPEEDUP = 1.66
REACHED_BYTES = 0.8  # of a data sheet's bandwidth, memory and links; the goal of the optimizer kernel is 0.85 of a copy
RESERVED_BYTES = 2 * 2**30  # of a card, for what a prediction does not see: context, libraries, executables
NETWORK_GB_S = 50.0  # between hosts, per GPU: one adapter of 400 Gbit/s each


@dataclass(frozen=True)
class Card:
    name: str
    memory_gib: float  # as nvidia-smi shows it, rounded down
    bf16_tflops: float
    memory_gb_s: float
    link_gb_s: float  # to a peer on the same host
    fp8: bool = True  # has products in it

    def flops(self, precision: str = "own") -> float:
        """Per second, as steps reach them, of products in bf16 or "fp8"."""
        return REACHED_FLOPS * self.bf16_tflops * 1e12 * (FP8_SPEEDUP if precision == "fp8" else 1.0)

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    def memory_ms(self, num_bytes: float) -> float:
        """To read or write so much memory."""
        return num_bytes / (REACHED_BYTES * self.memory_gb_s) / 1e6

    def link_ms(self, num_bytes: float) -> float:
        return num_bytes / (REACHED_BYTES * self.link_gb_s) / 1e6


CARDS = {
    card.name: card
    for card in (
        Card("a100-40gb", 39, 312, 1555, 300, fp8=False),
        Card("a100-80gb", 79, 312, 2039, 300, fp8=False),
        Card("h100", 79, 989, 3350, 450),
        Card("h100-pcie", 79, 756, 2000, 64),
        Card("h20", 95, 148, 4000, 450),
        Card("h200", 139, 989, 4800, 450),
        Card("b200", 178, 2250, 7700, 900),
        Card("l40s", 44, 362, 864, 32),
        Card("rtx-4090", 23, 165, 1008, 32),
        Card("rtx-5090", 31, 209, 1792, 64),
        Card("rtx-pro-6000", 94, 503, 1792, 64),
    )
}
DEFAULT = "h200"


def card_of(name: str) -> Card:
    """A card by the name of the table.

    Raises:
        UsageError: with the nearest known one.
    """
    if name.lower() not in CARDS:
        nearest = difflib.get_close_matches(name.lower(), CARDS, n=1, cutoff=0.5)
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        raise UsageError(f"plan: --gpu is one of {', '.join(CARDS)}, found {name!r}{hint}")
    return CARDS[name.lower()]


def card_named(product: str | None) -> Card | None:
    """The card whose product name a driver gives, such as "NVIDIA H200"; None where the table lacks it."""
    words = (product or "").lower().replace("-", " ").split()
    known = [card for card in CARDS.values() if set(card.name.replace("-", " ").split()) <= set(words)]
    return max(known, key=lambda card: len(card.name), default=None)
