"""Renders conversations with the tokenizer's own chat template and marks the tokens that the assistant wrote.

Promises: the token ids are those of the whole rendered text; the mask covers what the model writes in each assistant
turn, its end-of-turn token included, and never a turn's header. Where the two cannot be told apart the row is refused,
not guessed.
Does not: import transformers; the tokenizer is given.

How turns are found: by the template's generation tags where it has them. Else by rendering prefix by prefix; each
prefix must be a prefix of the whole. Templates that rewrite earlier turns (Qwen3 drops their reasoning) break that;
there, turns are found by the header that the generation prompt writes and the token that ends a turn, as many times as
there are assistant turns.
"""

import hashlib
import json
import re
from bisect import bisect_left
from itertools import groupby
from typing import Any

import numpy as np

from draftgraph.engine.data.formats import Conversation, Rendered
from draftgraph.engine.data.masks import EVERYTHING, Span, Supervision, TemplateRefusal
from draftgraph.engine.errors import DataError


class Template:
    """A tokenizer's chat template, as prepare uses it."""

    def __init__(self, tokenizer: Any, supervision: Supervision = EVERYTHING) -> None:
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
        self._has_tags = re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None
        added = tokenizer.added_tokens_decoder.values()
        self._specials = tuple({token.content for token in added if token.special} | set(tokenizer.all_special_tokens))

    @property
    def unknown_id(self) -> int:
        """The id of text that the tokenizer does not know, -1 where it knows all or its unknown token means more."""
        others = (self.tokenizer.eos_token_id, self.tokenizer.bos_token_id, self.tokenizer.pad_token_id)
        unknown = self.tokenizer.unk_token_id
        return -1 if unknown is None or unknown in others else unknown

    def encode(self, row: Conversation | Rendered) -> tuple[np.ndarray, np.ndarray]:
        """Tokenise a row: input_ids [n] int64, loss_mask [n] bool; of a text that came rendered, all is supervised."""
        if isinstance(row, Rendered):
            _check_text(row.text)
            ids = self._tokenise(row.text).ids
            return np.array(ids, dtype=np.int64), np.ones(len(ids), dtype=bool)
        if any("tool_calls" in message for message in row.messages) and "tool_calls" not in self.source:
            raise TemplateRefusal("the chat template does not write tool calls, and this row has some")
        text = self._apply(row.messages, row.tools)
        if self._has_tags:
            encoded, turns = self._tagged(row)
        else:
            encoded, turns = self._tokenise(text), self._prefix_spans(row, text) or self._header_spans(row, text)
        spans = self.supervision.narrow(text, turns, row.messages)
        mask = np.zeros(len(encoded), dtype=bool)
        for start, stop in spans:
            first = _token_at(encoded, start)
            mask[first : _token_at(encoded, stop, first)] = True
        return np.array(encoded.ids, dtype=np.int64), mask

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
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error
        if isinstance(rendered, str):
            _check_text(rendered)
        return rendered

    def _tagged(self, row: Conversation) -> tuple[Any, list[Span]]:
        """The tokens, and each run of them that the template's own tags mark."""
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(row.messages, row.tools, tokenize=True, **options)
        encoded = found.encodings[0]
        runs = groupby(zip(found["assistant_masks"], encoded.offsets, strict=True), lambda pair: bool(pair[0]))
        tagged = [[offset for _, offset in run] for marked, run in runs if marked]
        return encoded, [(run[0][0], run[-1][1]) for run in tagged]

    def _prefix_spans(self, row: Conversation, text: str) -> list[Span]:
        """Each assistant turn is what its message adds to the prompt before it; empty when a prefix is not stable."""
        spans = []
        for index, message in enumerate(row.messages):
            if message["role"] != "assistant":
                continue
            try:
                is_last = index + 1 == len(row.messages)
                after = text if is_last else self._apply(row.messages[: index + 1], row.tools)
                prompt = self._apply(row.messages[:index], row.tools, add_generation_prompt=True) if index else ""
                # One more rendering, and only where the prompt with its header is no prefix itself.
                before = "" if after.startswith(prompt) else self._apply(row.messages[:index], row.tools)
            except TemplateRefusal:
                return []
            if not (text.startswith(after) and after.startswith(before)):
                return []
            # A generation prompt may open a think block that a finished turn lacks: the header ends where they part.
            start = max(len(before), _shared(prompt, after))
            spans.append((start, self._end_of_turn(text, start, len(after))))
        return spans

    def _header_spans(self, row: Conversation, text: str) -> list[Span]:
        """Each assistant turn runs from the generation prompt's header to the next special token that ends a turn."""
        turns = sum(message["role"] == "assistant" for message in row.messages)
        if not turns:
            return []
        question = [{"role": "user", "content": "?"}]
        before, prompt = self._apply(question, None), self._apply(question, None, add_generation_prompt=True)
        after = self._apply([*question, {"role": "assistant", "content": "."}], None)
        header = after[len(before) : _shared(prompt, after)]
        end = after[len(before) + len(header) :].rstrip()
        ends = [special for special in self._specials if end.endswith(special)]
        starts = [match.end() for match in re.finditer(re.escape(header), text)] if header and ends else []
        stops = [text.find(max(ends, key=len), start) for start in starts]
        if len(starts) != turns or -1 in stops:
            raise TemplateRefusal(
                "the chat template rewrites earlier turns, and the assistant's turns cannot be found in its text"
            )
        return [(start, stop + len(max(ends, key=len))) for start, stop in zip(starts, stops, strict=True)]

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


def _shared(first: str, second: str) -> int:
    """How many leading characters two texts share."""
    if second.startswith(first):
        return len(first)
    differ = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))
