"""What of the assistant's turns is supervised: all of them or the last, with or without thinking and tool calls.

Promises: what is left out is left out in every row, or the row is refused: a switch never quietly does nothing.
Thinking and tool calls are known by the markers that model families write around them.
"""

from dataclasses import dataclass
from typing import Any

from draftgraph.engine.errors import DataError

Span = tuple[int, int]  # characters of the rendered text

TURNS = ("all", "last")
# An opening and a closing marker; without a closing one it lasts to the end of the turn. In the order of the pairs:
# Qwen, DeepSeek; Magistral. Then Qwen, Hermes; Mistral; Llama 3; DeepSeek.
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
TOOL_CALLS: tuple[tuple[str, str], ...] = (
    ("<tool_call>", "</tool_call>"),
    ("[TOOL_CALLS]", ""),
    ("<|python_tag|>", ""),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
)


class TemplateRefusal(DataError):
    """The chat template cannot render this row, or what the mask needs cannot be found in its text."""


@dataclass(frozen=True)
class Supervision:
    """The switches of `prepare`."""

    turns: str = "all"
    thinking: bool = True
    tool_calls: bool = True

    def narrow(self, text: str, turns: list[Span], messages: list[dict[str, Any]]) -> list[Span]:
        """Keep of the assistant's turns what is supervised.

        Args:
            text: the rendered conversation.
            turns: what the assistant wrote, ascending.
            messages: the conversation.
        Returns:
            The supervised spans, ascending.
        Raises:
            TemplateRefusal: something to leave out has none of the known markers.
        """
        answers = [message for message in messages if message["role"] == "assistant"]
        if self.turns == "last":
            turns, answers = turns[-1:], answers[-1:]
        written = "\n".join(text[start:stop] for start, stop in turns)
        if not self.thinking:
            reasoning = [message.get("reasoning_content", "").strip() for message in answers]
            _check_marked("thinking", THINKING, written, any(part and part in written for part in reasoning))
            turns = [part for turn in turns for part in _without(text, turn, THINKING)]
        if not self.tool_calls:
            _check_marked("tool calls", TOOL_CALLS, written, any(message.get("tool_calls") for message in answers))
            turns = [part for turn in turns for part in _without(text, turn, TOOL_CALLS)]
        return turns


EVERYTHING = Supervision()


def _check_marked(what: str, markers: tuple[tuple[str, str], ...], written: str, is_there: bool) -> None:
    if is_there and not any(marker in written for pair in markers for marker in pair if marker):
        known = ", ".join(opening for opening, _ in markers)
        raise TemplateRefusal(f"{what} cannot be told apart in the template's text: it has none of {known}")


def _without(text: str, turn: Span, markers: tuple[tuple[str, str], ...]) -> list[Span]:
    """The parts of a turn outside the markers; white space behind a closing one goes with it."""
    parts = [turn]
    for opening, closing in markers:
        parts = [kept for part in parts for kept in _outside(text, part, opening, closing)]
    return parts


def _outside(text: str, part: Span, opening: str, closing: str) -> list[Span]:
    place, stop = part
    kept = []
    begin, end = text.find(opening, place, stop), text.find(closing, place, stop) if closing else -1
    if end >= 0 and not 0 <= begin < end:
        begin = place  # the generation prompt opened it
    while begin >= 0:
        kept.append((place, begin))
        end = text.find(closing, begin, stop) if closing else -1
        place = end + len(closing) if end >= 0 else stop
        while place < stop and text[place].isspace():
            place += 1
        begin = text.find(opening, place, stop)
    return [(first, last) for first, last in [*kept, (place, stop)] if first < last]
