"""Measures `prepare` beside the tokenizers library alone, and collation; writes profiles/results/prepare.json.

    python profiles/data/measure_prepare.py 20000 2              # rows, cores

The rows are the demo's conversations in new combinations. Both sides use as many threads or processes and take turns,
`prepare` with all it does: start, read, render, tokenise, mask, judge, write. Medians of the rounds.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from draftgraph.engine.data.anchors import AnchorDraw
from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.collate import SlotLayout, collate
from draftgraph.engine.data.prepare import prepare
from draftgraph.engine.data.schedule import MicroBatch
from draftgraph.engine.data.shards import ShardReader
from draftgraph.engine.data.template import Template
from draftgraph.engine.data.writer import ShardWriter
from draftgraph.profiles.measure import receipt, write_receipt

ROUNDS = 3
HERE = Path(__file__).parent
BATCH_TOKENS = 49_152
CONTEXT = 2048


def main(num_rows: int, workers: int) -> None:
    os.environ.update(RAYON_NUM_THREADS=str(workers), TOKENIZERS_PARALLELISM="true")
    from draftgraph.engine.models.target import load_config, load_tokenizer

    tokenizer = load_tokenizer("smollm2")
    template, vocab_size = Template(tokenizer), load_config("smollm2").vocab_size
    template.fingerprint()
    rules = {"max_context": 4096, "block_size": 16, "vocab_size": vocab_size, "anchor_rule": "next-supervised"}
    conversations = make_conversations(num_rows)
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in conversations]
    alone, whole = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
        for _ in range(ROUNDS):
            started, tokens = time.perf_counter(), 0
            for first in range(0, num_rows, 1000):
                encoded = tokenizer.backend_tokenizer.encode_batch(
                    texts[first : first + 1000], add_special_tokens=False
                )
                tokens += sum(map(len, encoded))
            alone.append(tokens / (time.perf_counter() - started))
            started = time.perf_counter()
            out = Path(folder) / "shards"
            summary = prepare([file], template, out, target="smollm2", progress=False, workers=workers, **rules)
            seconds = time.perf_counter() - started
            whole.append(summary["tokens"] / seconds)
            print(f"alone {alone[-1]:,.0f} tokens/s, prepare {whole[-1]:,.0f}", flush=True)
        ours = {
            "rows": num_rows,
            "workers": workers,
            "tokens_per_s": median(whole),
            "rows_per_s": median(whole) * num_rows / summary["tokens"],
            "rounds_tokens_per_s": whole,
            "collate_ms": collation_ms(Path(folder) / "batch", vocab_size),
            "load_average": os.getloadavg()[0],
        }
    peer: dict[str, object] = {
        "name": "tokenizers.Tokenizer.encode_batch of the rendered texts",
        "tokens_per_s": median(alone),
    }
    peer["rounds_tokens_per_s"] = alone
    ratio = median(one / other for one, other in zip(whole, alone, strict=True))
    content = receipt("prepare", "smollm2", ours=ours, peer=peer, ratio=ratio)
    write_receipt(HERE.parent / "results" / "prepare.json", content)
    print(json.dumps({"ours": ours, "peer": peer, "ratio": ratio}, indent=1))


def make_conversations(num_rows: int) -> list[list[dict[str, str]]]:
    """One to three exchanges each; the number makes every row a row of its own."""
    generator = random.Random(0)
    source = [json.loads(line)["messages"] for line in (HERE / "smollm2-code.jsonl").read_text().splitlines()]
    rows = []
    for number in range(num_rows):
        picked = generator.choices(source, k=generator.choice((1, 1, 1, 2, 3)))
        turns = [dict(message) for messages in picked for message in messages if message["role"] != "system"]
        turns[0]["content"] = f"{number}. {turns[0]['content']}"
        rows.append(turns)
    return rows


def collation_ms(folder: Path, vocab_size: int) -> float:
    """Median time to collate full rows of a bucket, 512 anchors each, into a slot."""
    rows, generator = BATCH_TOKENS // CONTEXT, np.random.default_rng(0)
    with ShardWriter(folder, vocab_size=vocab_size, fingerprint="", max_context=CONTEXT) as writer:
        for _ in range(rows):
            writer.append(generator.integers(0, vocab_size, CONTEXT), np.arange(CONTEXT) >= CONTEXT // 4)
        writer.finish({})
    source, layout = ShardReader(folder), SlotLayout(Bucket(rows, CONTEXT, 512))
    views, draw = layout.numpy_views(np.zeros(layout.num_bytes, dtype=np.uint8)), AnchorDraw(0, 512, 16)
    times = []
    for epoch in range(50):
        batch = MicroBatch(epoch, 0, np.arange(rows), np.full(rows, epoch))
        started = time.perf_counter()
        collate(batch, source, views, draw)
        times.append(1000 * (time.perf_counter() - started))
    return median(times)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
