"""The target answers here: `generate` of its Hugging Face module, a batch at a time.

Promises: greedy answers do not depend on the batch, as far as floating point allows. Sampled ones are repeatable on the
same device with the same batch size, also after an interruption: batches lie at fixed places, each with its own seed.
"""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from draftgraph.engine.data.answers import CUT, EMPTY_ANSWER, Answer, Answers, NoAnswer, Sampling
from draftgraph.engine.data.prompts import Question, render_messages
from draftgraph.engine.errors import DataError

REFUSED = "template refused"


class LocalTarget:
    """A causal LM with `generate`, on its device, and its tokenizer with a chat template."""

    retries = 0

    def __init__(self, target: str, model: Any, tokenizer: Any, sampling: Sampling, batch_size: int) -> None:
        self.settings = {"target": target, "server": None, **asdict(sampling)}
        self._model, self._tokenizer, self._sampling, self._batch_size = model, tokenizer, sampling, batch_size
        stops = model.generation_config.eos_token_id
        self._stops = set(stops if isinstance(stops, list) else [stops])
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # masked wherever it pads: any token will do

    def answers(self, questions: list[Question], missing: Collection[int]) -> Answers:
        for start in range(0, len(questions), self._batch_size):
            texts: dict[int, str] = {}
            for index in range(start, min(start + self._batch_size, len(questions))):
                if index in missing:
                    try:
                        question = questions[index]
                        texts[index] = render_messages(self._tokenizer, question.messages, question.tools)
                    except DataError as error:
                        yield index, NoAnswer(REFUSED, str(error))
            if texts:
                batch = self._generate(list(texts.values()), self._sampling.seed + start)
                yield from zip(texts, batch, strict=True)

    def _generate(self, texts: list[str], seed: int) -> list[Answer | NoAnswer]:
        """Answers of one batch; left padding, so that every answer starts at the same column."""
        # The template wrote the special tokens already.
        encoded = self._tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        ).to(self._model.device)
        how: dict[str, Any] = {"do_sample": False}
        if not self._sampling.greedy:
            import torch  # here: this room does without it

            torch.manual_seed(seed)
            # A model's own top_k would narrow the choice behind the user's back.
            how = {
                "do_sample": True,
                "temperature": self._sampling.temperature,
                "top_p": self._sampling.top_p,
                "top_k": 0,
            }
        tokens = self._model.generate(
            **encoded, max_new_tokens=self._sampling.max_new_tokens, pad_token_id=self._tokenizer.pad_token_id, **how
        )
        return [self._answer(row) for row in tokens[:, encoded["input_ids"].shape[1] :].tolist()]

    def _answer(self, ids: list[int]) -> Answer | NoAnswer:
        length = next((place for place, token in enumerate(ids) if token in self._stops), None)
        text = self._tokenizer.decode(ids[:length], skip_special_tokens=True)
        if not text.strip():
            return NoAnswer(EMPTY_ANSWER, f"{len(ids[:length])} tokens without text")
        message = {"role": "assistant", "content": text}
        return Answer(message, CUT, len(ids)) if length is None else Answer(message, "stop", length + 1)
