"""Answer prompts with the target itself, so that the drafter learns what the target says, not what somebody else said.

Promises: greedy answers, one row appended per prompt in the order of the prompts, a batch at a time; a second call
goes on where the first one stopped. It does not judge the answers: `prepare` counts what it cannot use.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftgraph.engine.data.prompts import load_prompts, render_prompt
from draftgraph.engine.errors import DataError
from draftgraph.engine.progress import progress_bar

ROW_START = b'{"messages": ['


def answered(out: Path) -> set[str]:
    """The prompts that `out` holds an answer to; a last row that an interruption tore is cut off.

    Raises:
        DataError: it holds something else, which is left as it is.
    """
    if not out.exists():
        return set()
    raw = out.read_bytes()
    whole, torn = raw[: raw.rfind(b"\n") + 1], raw[raw.rfind(b"\n") + 1 :]
    try:
        # NOTE: not splitlines, which also splits at separators that stand inside a row.
        found = {json.loads(line)["messages"][0]["content"] for line in whole.decode().split("\n") if line}
        if torn and not (torn.startswith(ROW_START) or ROW_START.startswith(torn)):
            raise ValueError("its last line is no regenerated row")
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(f"{out} holds something other than regenerated rows: name another output file") from error
    if torn:
        out.write_bytes(whole)
    return found


def answers(prompts: list[str], model: Any, tokenizer: Any, max_new_tokens: int) -> list[str]:
    """Greedy answers of one batch; left padding, so that every answer starts at the same column."""
    texts = [render_prompt(tokenizer, prompt) for prompt in prompts]
    # The template wrote the special tokens already.
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    batch = batch.to(model.device)
    tokens = model.generate(
        **batch, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def batches(rows: list[str], batch_size: int) -> Iterator[list[str]]:
    for start in range(0, len(rows), batch_size):
        yield rows[start : start + batch_size]


def regenerate(
    prompts_path: Path,
    model: Any,
    tokenizer: Any,
    out: Path,
    *,
    max_new_tokens: int,
    batch_size: int,
    progress: bool,
) -> dict[str, Any]:
    """Append the target's greedy answer to every prompt that `out` does not answer yet.

    Args:
        prompts_path: any file of prompts that `load_prompts` takes.
        model: a causal LM with `generate`, on its device.
        tokenizer: its tokenizer, with a chat template and a pad token.
        out: JSON lines of {"messages": [user, assistant]}, created or continued.
        max_new_tokens: an answer is cut there; `prepare` cuts rows at its own maximum.
        batch_size: prompts per call of `generate`.
        progress: draw a bar with the time left on stderr.
    Returns:
        rows_read, rows_answered (by this call), rows_skipped (answered before), out.
    Raises:
        DataError: the prompts cannot be read, or `out` holds something else.
    """
    prompts = list(dict.fromkeys(load_prompts(str(prompts_path))))
    done = answered(out)
    open_prompts = [prompt for prompt in prompts if prompt not in done]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("a", encoding="utf-8", newline="\n")
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}; name another --out") from error
    with progress_bar(disable=not progress) as bar, file:
        task = bar.add_task("answering", total=len(prompts), completed=len(prompts) - len(open_prompts))
        for batch in batches(open_prompts, batch_size):
            for prompt, answer in zip(batch, answers(batch, model, tokenizer, max_new_tokens), strict=True):
                turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
            file.flush()
            bar.advance(task, len(batch))
    return {
        "rows_read": len(prompts),
        "rows_answered": len(open_prompts),
        "rows_skipped": len(prompts) - len(open_prompts),
        "out": str(out),
    }
