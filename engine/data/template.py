"""Renders conversations with the tokenizer's own chat template and marks the tokens that the assistant wrote.

Promises: the token ids are those of the whole rendered text; the mask covers what the model writes in each assistant
turn, its end-of-turn token included, and never a turn's header. Where the two cannot be told apart the row is refused,
not guessed.
Does not: import transformers; the tokenizer is given.

How turns are found (`mask`; "auto" takes the first that works): by the template's `generation` tags where it has them.
By `prefix`: rendering prefix by prefix, each of which must be a prefix of the whole; templates that rewrite earlier
turns (Qwen3 drops their reasoning) break that. By the preset of the family whose markers the template has. By `header`:
what the generation prompt writes and the token that ends a turn, as often as there are answers.
"""

import hashlib
import json
import re
from collections.abc import Callable
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

from draftgraph.engine.data.formats import Conversation, Rendered
from draftgraph.engine.data.masks import EVERYTHING, Span, Supervision, TemplateRefusal
from draftgraph.engine.data.presets import PRESETS, Preset
from draftgraph.engine.errors import DataError

MASKS = ("auto", "generation", "prefix", "header", *PRESETS)
QUESTION = [{"role": "user", "content": "?"}]


class Encoded(NamedTuple):
    """One row of tokens."""

    input_ids: list[int]
    loss_mask: list[bool]
    found_by: str  # one of MASKS but "auto"; "text" where all of it is supervised
    left_out: list[str]  # what of the row the template does not write


class Template:
    """A tokenizer's chat template, as prepare uses it."""

    def __init__(self, tokenizer: Any, supervision: Supervision = EVERYTHING, mask: str = "auto") -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the target's tokenizer has no chat template; use a chat model, or give rows of input_ids and loss_mask"
            )
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} is a slow tokenizer without offsets; expected a fast one (tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self.supervision = supervision
        self.source = tokenizer.get_chat_template()
        tagged = re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None
        if mask == "generation" and not tagged:
            raise DataError("the target's chat template has no generation tags: use --mask auto, or a preset")
        if mask == "auto":
            fitting = [name for name, preset in PRESETS.items() if preset.sign in self.source]
            self._ways = ["generation"] if tagged else ["prefix", *fitting, "header"]
        else:
            self._ways = [mask]
        added = tokenizer.added_tokens_decoder.values()
        self._specials = tuple({token.content for token in added if token.special} | set(tokenizer.all_special_tokens))

    @property
    def unknown_id(self) -> int:
        """The id of text that the tokenizer does not know, -1 where it knows all or its unknown token means more."""
        others = (self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, self.tokenizer.pad_token_id)
        unknown = self.tokenizer.unk_token_id
        return -1 if unknown is None or unknown in others else unknown

    def encode(self, row: Conversation | Rendered) -> Encoded:
        """Tokenise a row and find what is supervised: all of a text that came rendered, unless a preset is named."""
        if isinstance(row, Rendered):
            _check_text(row.text)
            if self._ways[0] not in PRESETS:
                ids = self.tokenizer(row.text, add_special_tokens=False, verbose=False)["input_ids"]
                return Encoded(list(ids), [True] * len(ids), "text", [])
            text, messages = row.text, []
        else:
            if any("tool_calls" in message for message in row.messages) and "tool_calls" not in self.source:
                raise TemplateRefusal("the chat template does not write tool calls, and this row has some")
            text, messages = self._apply(row.messages, row.tools), row.messages
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = encoded["offset_mapping"]
        turns, found_by = self._find(row, text, offsets)
        spans = self.supervision.narrow(text, turns, messages)
        mask = [any(start <= first < stop for start, stop in spans) for first, _ in offsets]
        return Encoded(list(encoded["input_ids"]), mask, found_by, self._left_out(row, text))

    def fingerprint(self) -> str:
        """Names the tokenizer and template that shards were written with."""
        probe = self.tokenizer("def f(x):\n    return x + 1  # \u00e9\u4e2d 42", add_special_tokens=False)["input_ids"]
        facts = json.dumps([len(self.tokenizer), self.source, list(probe)])
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def _apply(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> Any:
        try:
            rendered = self.tokenizer.apply_chat_template(messages, tools=tools, **{"tokenize": False, **options})
        # A template is a program of its author's that runs on the user's row: it may raise anything.
        except Exception as error:
            raise TemplateRefusal(f"{type(error).__name__}: {error}{_odd_arguments(messages)}") from error
        if isinstance(rendered, str):
            _check_text(rendered)
        return rendered

    def _find(self, row: Conversation | Rendered, text: str, offsets: list[Span]) -> tuple[list[Span], str]:
        """The assistant's turns, and the first way that found them."""
        if isinstance(row, Rendered):
            return self._preset_spans(self._ways[0], None, text), self._ways[0]
        answers = [message for message in row.messages if message["role"] == "assistant"]
        ways: dict[str, Callable[[], list[Span]]] = {
            "generation": partial(self._tag_spans, row, offsets),
            "prefix": partial(self._prefix_spans, row, text),
            **{way: partial(self._preset_spans, way, answers, text) for way in ("header", *PRESETS)},
        }
        refusals = []
        for way in self._ways:
            try:
                return ways[way](), way
            except TemplateRefusal as refusal:
                refusals.append(f"{way}: {refusal}")
        raise TemplateRefusal(f"the assistant's turns cannot be found in the template's text; {'; '.join(refusals)}")

    def _left_out(self, row: Conversation | Rendered, text: str) -> list[str]:
        if isinstance(row, Rendered):
            return []
        thoughts = [message.get("reasoning_content", "").strip() for message in row.messages]
        lost = {
            "thinking": any(thought not in text for thought in thoughts),
            "tools": bool(row.tools) and "tools" not in self.source,
        }
        return [what for what, is_lost in lost.items() if is_lost]

    def _tag_spans(self, row: Conversation, offsets: list[Span]) -> list[Span]:
        """Each run of tokens that the template's own tags mark."""
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        marks = self._apply(row.messages, row.tools, tokenize=True, **options)["assistant_masks"]
        runs = groupby(zip(marks, offsets, strict=True), lambda pair: bool(pair[0]))
        tagged = [[offset for _, offset in run] for marked, run in runs if marked]
        return [(run[0][0], run[-1][1]) for run in tagged]

    def _prefix_spans(self, row: Conversation, text: str) -> list[Span]:
        """Each assistant turn is what its message adds to the prompt before it."""
        spans = []
        for index, message in enumerate(row.messages):
            if message["role"] != "assistant":
                continue
            before = self._apply(row.messages[:index], row.tools) if index else ""
            prompt = self._apply(row.messages[:index], row.tools, add_generation_prompt=True) if index else ""
            after = self._apply(row.messages[: index + 1], row.tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise TemplateRefusal("the template rewrites earlier turns")
            # A generation prompt may open a think block that a finished turn lacks: the header ends where they part.
            start = max(len(before), _shared(prompt, after))
            spans.append((start, self._end_of_turn(text, start, len(after))))
        return spans

    def _preset_spans(self, name: str, answers: list[dict[str, Any]] | None, text: str) -> list[Span]:
        """Each turn by a family's markers; what the generation prompt opens behind its header is header too."""
        preset = self._learned if name == "header" else PRESETS[name]
        turns = preset.turns(text, answers)
        headers = list(re.finditer(preset.start, self._prompt))
        opened = self._prompt[headers[-1].end() :] if headers else ""
        return [(start + len(opened) * text.startswith(opened, start, stop), stop) for start, stop in turns]

    @cached_property
    def _prompt(self) -> str:
        """A question and the generation prompt; empty where the template refuses it."""
        try:
            return self._apply(QUESTION, None, add_generation_prompt=True)
        except TemplateRefusal:
            return ""

    @cached_property
    def _learned(self) -> Preset:
        """The markers of a family that has no preset, from what the template makes of a question and its answer."""
        before, after = (
            self._apply(QUESTION, None),
            self._apply([*QUESTION, {"role": "assistant", "content": "."}], None),
        )
        header = after[len(before) : _shared(self._prompt, after)]
        end = after[len(before) + len(header) :].rstrip()
        ends = [special for special in self._specials if end.endswith(special)]
        if not header or not ends:
            raise TemplateRefusal("the template has no header before an answer, or no token behind it")
        return Preset(header, re.escape(header), (max(ends, key=len),))

    def _end_of_turn(self, text: str, start: int, stop: int) -> int:
        """The model stops at its end-of-turn token: a line break that a template adds behind is not the model's."""
        written = text[start:stop].rstrip()
        return start + len(written) if written.endswith(self._specials) else stop


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateRefusal("the text holds half of a surrogate pair") from error


def _odd_arguments(messages: list[dict[str, Any]]) -> str:
    """What a template that wants mappings stumbled over, in words."""
    functions = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    odd = [function["name"] for function in functions if not isinstance(function["arguments"], dict)]
    return f" (the arguments of the call to {odd[0]} are no JSON object)" if odd else ""


def _shared(first: str, second: str) -> int:
    """How many leading characters two texts share."""
    differ = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))
