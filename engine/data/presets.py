"""How families of chat models write an assistant's turn: tables, and one way to find the turns by them.

Promises: a turn runs from behind the family's header to its end-of-turn token, which belongs to it. A text in which the
headers, the ends and the conversation do not agree is refused with the reason.
Does not: know templates or tokens; texts only.
"""

import re
from dataclasses import dataclass
from typing import Any

from draftgraph.engine.data.masks import Span, TemplateRefusal


@dataclass(frozen=True)
class Preset:
    """One family's markers."""

    sign: str  # opens a turn that is not the assistant's; the family's templates hold it
    start: str  # a pattern: the assistant's turn starts behind it
    ends: tuple[str, ...]

    def turns(self, text: str, answers: list[dict[str, Any]] | None) -> list[Span]:
        """Find what the assistant wrote.

        Args:
            text: the rendered conversation.
            answers: the assistant's messages; None where the text came rendered.
        Returns:
            The turns, ascending, without headers and with the tokens that end them.
        Raises:
            TemplateRefusal: none is found, or they cannot be the assistant's.
        """
        starts = [match.end() for match in re.finditer(self.start, text)]
        if answers is None and not starts:
            raise TemplateRefusal("no header of an answer found")
        if answers is not None and len(starts) != len(answers):
            raise TemplateRefusal(f"{len(answers)} answers, but {len(starts)} headers")
        if any(end in str(answer) for answer in answers or [] for end in self.ends):
            raise TemplateRefusal("an answer holds a token that ends turns")
        spans = []
        for number, (start, limit) in enumerate(zip(starts, [*starts[1:], len(text)], strict=True), start=1):
            stops = [text.find(end, start, limit) + len(end) for end in self.ends if end in text[start:limit]]
            if not stops or self.sign in text[start : min(stops)]:
                raise TemplateRefusal(f"answer {number} does not end in {' or '.join(self.ends)}")
            spans.append((start, min(stops)))
        return spans


# Mistral's and DeepSeek's models answer a tool's result without a header of their own, behind the last result.
PRESETS = {
    "chatml": Preset("<|im_start|>", r"<\|im_start\|>assistant\n", ("<|im_end|>",)),
    "llama3": Preset(
        "<|start_header_id|>",
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
        ("<|eot_id|>", "<|eom_id|>"),
    ),
    "gemma": Preset("<start_of_turn>", r"<start_of_turn>model\n", ("<end_of_turn>",)),
    "mistral": Preset("[INST]", r"\[/(?:INST|TOOL_RESULTS)\](?!\s*\[(?:INST|TOOL_RESULTS)\])", ("</s>",)),
    # Between its bars are U+FF5C, between its words U+2581.
    "deepseek": Preset(
        "<\uff5cUser\uff5c>",
        "<\uff5cAssistant\uff5c>|<\uff5ctool\u2581outputs\u2581end\uff5c>"
        "|<\uff5ctool\u2581output\u2581end\uff5c>(?!\\s*<\uff5c(?:tool\u2581output|User|Assistant))",
        ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    ),
}
