"""A run folder as a long run on several GPUs leaves it, written without running: for tests of reports."""

import json
import math
import random
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECEIPT = ROOT / "profiles" / "results" / "qwen3.5-0.8b-1gpu.json"
START = 1_790_000_000.0
GIB = 2**30


def write_run(folder: Path, steps: int, num_devices: int = 2, block_size: int = 16, seed: int = 0) -> Path:
    """A run of `steps` steps of a quarter of a second, two minutes of warm-up, one stall and no movement of memory."""
    folder.mkdir(parents=True)
    generator = random.Random(seed)
    recorded = json.loads(RECEIPT.read_text())
    warmup = recorded.pop("warmup")
    recorded["ours"] |= {"steps": steps}
    (folder / "receipt.json").write_text(json.dumps(recorded))
    (folder / "warmup.json").write_text(json.dumps(warmup))
    (folder / "profile.toml").write_text(f"[run]\nsteps = {steps}\nseed = {seed}\n\n[optim]\nlr = 6e-4\n")
    names = [row["bucket"] for row in warmup["graphs"] if row["step"] == "target"]
    sizes = [[int(part[1:]) for part in name.split("-")] for name in names]
    counts = [120] * len(sizes)
    rows = [int(4096 * min(1.0, generator.lognormvariate(-1.2, 0.7))) for _ in range(5000)]
    bins = [0] * 60
    for length in rows:
        bins[min(59, length // 69)] += 1
    filling = {
        "buckets": [{"rows": r, "context": s, "anchors": a} for r, s, a in sizes],
        "rows_per_bucket": counts,
        "tokens_per_bucket": [int(0.9 * 120 * s) for _, s, _ in sizes],
        "lengths": {"width": 69, "counts": bins, "rows": len(rows), "tokens": sum(rows)},
    }
    (folder / "buckets.json").write_text(json.dumps(filling))
    # Noise and slots of a hundred steps, over and over: a long run is written in a second.
    noise = [generator.gauss(0, 1) for _ in range(100)]
    falling = [[0.9**k * generator.uniform(0.7, 1.0) for k in range(1, block_size)] for _ in range(100)]
    now = START + 120
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            now += 0.25 + 0.01 * noise[step % 97] + (20.0 if step == steps // 2 else 0.0)
            progress = 1 - math.exp(-4 * step / steps)
            line = {
                "step": step,
                "loss": 10 - 8 * progress + 0.2 * noise[step % 100],
                "accuracy_per_slot": [round(progress * share, 3) for share in falling[step % 100]],
                "acceptance": 1 + 3 * progress + 0.1 * noise[step % 89],
                "grad_norm": 1 + 0.2 * noise[step % 83],
                "lr": 6e-4 * 0.5 * (1 + math.cos(math.pi * step / steps)),
                "skipped": 0,
                "real_tokens": 14000 + int(800 * noise[step % 79]),
                "time": round(now, 3),
            }
            file.write(json.dumps(line) + "\n")
    write_devices(folder / "devices.jsonl", num_devices, 300, generator)
    return folder


def write_devices(path: Path, num_devices: int, samples: int, generator: random.Random, moves: bool = False) -> None:
    """Samples every two seconds, 60 of them warm-up; `moves`: the last device grows in the steady phase."""
    lines: list[dict] = [{"time": START, "phase": "warm-up", "event": "start"}]
    for number in range(samples):
        phase = "warm-up" if number < 60 else "steady"
        now = START + 2 * number
        if number == 60:
            lines.append({"time": now, "phase": phase, "event": "phase"})
        for device in range(num_devices):
            grown = min(number, 59) / 59
            used = int((2 + 80 * grown + device) * GIB)
            if moves and device == num_devices - 1 and number >= 200:
                used += 3 * 2**20
            line = {
                "time": now,
                "phase": phase,
                "device": f"cuda:{device}",
                "used_bytes": used,
                "total_bytes": 140 * GIB,
                "utilisation": generator.randint(90, 100) if phase == "steady" else generator.randint(0, 60),
                "power_w": round(generator.uniform(550, 690), 1),
                "sm_mhz": generator.randint(1700, 1980),
                "temperature_c": generator.randint(55, 70),
                "throttled": ["power cap"] if generator.random() < 0.05 else [],
            }
            lines.append(line)
        lines.append({"time": now, "phase": phase, "device": "host", "used_bytes": int(6.1 * GIB)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
