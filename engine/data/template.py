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
from bisect import bisect_left
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from draftgraph.engine.data.formats import Conversation, Rendered
from draftgraph.engine.data.masks import EVERYTHING, Span, Supervision, TemplateRefusal
from draftgraph.engine.data.presets import PRESETS, Preset
from draftgraph.engine.errors import DataError

MASKS = ("auto", "generation", "prefix", "header", *PRESETS)
QUESTION = [{"role": "user", "content": "?"}]


class Encoded(NamedTuple):
    """One row of tokens."""

    input_ids: np.ndarray  # [n] int64
    loss_mask: np.ndarray  # [n] bool
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
        self.mask = mask
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
        # Of those, what the template writes itself.
        ends = (tokenizer.bos_token, tokenizer.eos_token)
        self._markers = tuple(token for token in self._specials if token in self.source or token in ends)

    @cached_property
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
                ids = self._tokenise(row.text).ids
                return Encoded(np.array(ids, dtype=np.int64), np.ones(len(ids), dtype=bool), "text", [])
            text, messages = row.text, []
        else:
            if any("tool_calls" in message for message in row.messages) and "tool_calls" not in self.source:
                raise TemplateRefusal("the chat template does not write tool calls, and this row has some")
            self._refuse_markers(row.messages)
            text, messages = self._apply(row.messages, row.tools), row.messages
        encoded, turns, found_by = self._find(row, text)
        mask = np.zeros(len(encoded), dtype=bool)
        for start, stop in self.supervision.narrow(text, turns, messages):
            first = _token_at(encoded, start)
            mask[first : _token_at(encoded, stop, first)] = True
        return Encoded(np.array(encoded.ids, dtype=np.int64), mask, found_by, self._left_out(row, text))

    def _refuse_markers(self, messages: list[dict[str, Any]]) -> None:
        """An answer that would end itself, or take turns of its own, in the middle of what is supervised."""
        for message in (message for message in messages if message["role"] == "assistant"):
            for key in ("content", "reasoning_content"):
                held = next((marker for marker in self._markers if marker in (message.get(key) or "")), None)
                if held:
                    raise TemplateRefusal(f"the text of an answer holds the template's own {held!r}")

    def _tokenise(self, text: str) -> Any:
        # NOTE: the tokenizer's own call takes a quarter of the time more, to make lists of what is not used here.
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend.encode(text, add_special_tokens=False)

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

    def _find(self, row: Conversation | Rendered, text: str) -> tuple[Any, list[Span], str]:
        """The tokens, the assistant's turns, and the first way that found them."""
        if isinstance(row, Rendered):
            return self._tokenise(text), self._preset_spans(self._ways[0], None, text), self._ways[0]
        answers = [message for message in row.messages if message["role"] == "assistant"]
        refusals = []
        for way in self._ways:
            try:
                if way == "generation":
                    return *self._tagged(row), way
                turns = self._prefix_spans(row, text) if way == "prefix" else self._preset_spans(way, answers, text)
                return self._tokenise(text), turns, way
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

    def _tagged(self, row: Conversation) -> tuple[Any, list[Span]]:
        """The tokens, and each run of them that the template's own tags mark."""
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(row.messages, row.tools, tokenize=True, **options)
        encoded = found.encodings[0]
        runs = groupby(zip(found["assistant_masks"], encoded.offsets, strict=True), lambda pair: bool(pair[0]))
        tagged = [[offset for _, offset in run] for marked, run in runs if marked]
        return encoded, [(run[0][0], run[-1][1]) for run in tagged]

    def _prefix_spans(self, row: Conversation, text: str) -> list[Span]:
        """Each assistant turn is what its message adds to the prompt before it."""
        spans = []
        for index, message in enumerate(row.messages):
            if message["role"] != "assistant":
                continue
            is_last = index + 1 == len(row.messages)
            after = text if is_last else self._apply(row.messages[: index + 1], row.tools)
            prompt = self._apply(row.messages[:index], row.tools, add_generation_prompt=True) if index else ""
            # One more rendering, and only where the prompt with its header is no prefix itself.
            before = "" if after.startswith(prompt) else self._apply(row.messages[:index], row.tools)
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


def _token_at(encoded: Any, place: int, first: int = 0) -> int:
    """The first token, from `first` on, that starts at or behind a character; making all offsets takes longer."""
    return bisect_left(range(len(encoded)), place, lo=first, key=lambda token: encoded.token_to_chars(token)[0])


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
    if second.startswith(first):
        return len(first)
    differ = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))
