"""The content of warmup.json: what every graph holds and costs, what every device has left, what was agreed.

Promises: read from the graphs and the devices themselves, not from configuration; what does not apply is null.
The schema is `profiles/warmup.schema.json`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftgraph.capture.ceiling import matmul_ceiling
from draftgraph.capture.lane import Lane
from draftgraph.engine.errors import CaptureError
from draftgraph.engine.show import bytes_text

# What to do where an op is not implemented as the profile demands.
INSTALL = {
    "fla": "pip install flash-linear-attention",
    "causal_conv1d": "pip install causal-conv1d (needs CUDA's compiler)",
}


@dataclass(frozen=True)
class DeviceBefore:
    """A device before the models were loaded; None on the CPU."""

    free_bytes: int | None
    ceiling_tflops: float | None  # of a large matrix product in the run's dtype
    fp8_ceiling_tflops: float | None = None  # and in FP8, where the target runs in that

    def fastest_ms(self, flops: int, fp8_flops: int) -> float | None:
        """What products would take at the ceilings: all of their FLOPs, and those of them in FP8."""
        if not self.ceiling_tflops or (fp8_flops and not self.fp8_ceiling_tflops):
            return None
        in_fp8 = fp8_flops / self.fp8_ceiling_tflops if self.fp8_ceiling_tflops else 0.0
        return ((flops - fp8_flops) / self.ceiling_tflops + in_fp8) / 1e9


def devices_before(
    devices: Sequence[torch.device], dtype: torch.dtype, fp8: Sequence[torch.device] = ()
) -> dict[str, DeviceBefore]:
    """Measure the devices of a run before anything is loaded; what that takes is given back.

    Args:
        fp8: those of a target in FP8. One that cannot is refused when its target is loaded.
    """
    found = {}
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            able = device in fp8 and torch.cuda.get_device_capability(device) >= (8, 9)
            fp8_ceiling = matmul_ceiling(device, torch.float8_e4m3fn) if able else None
            found[str(device)] = DeviceBefore(free, matmul_ceiling(device, dtype), fp8_ceiling)
            torch.cuda.empty_cache()
        else:
            found[str(device)] = DeviceBefore(None, None)
    return found


def graph_rows(lanes: Sequence[Lane], before: dict[str, DeviceBefore]) -> list[dict[str, Any]]:
    """One row per step, with the share of the ceiling of their type that its matrix products reach."""
    rows = []
    for row in (dataclasses.asdict(row) for lane in lanes for row in lane.evidence):
        fastest = before[row["device"]].fastest_ms(row["gemm_flops"] or 0, row["gemm_fp8_flops"] or 0)
        rows.append({**row, "gemm_ceiling_share": fastest / row["replay_ms"] if fastest and row["replay_ms"] else None})
    return rows


def lane_rows(lanes: Sequence[Lane], graphs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pool of every lane, beside that of its largest graph, which is captured first."""
    rows = []
    for lane in lanes:
        pools = [row["pool_bytes"] for row in graphs if row["lane"] == lane.name and row["pool_bytes"] is not None]
        largest = pools[0] if pools else None
        rows.append(
            {
                "lane": lane.name,
                "device": str(lane.device),
                "pool_bytes": sum(pools) if pools else None,
                "largest_pool_bytes": largest,
                "pool_over_largest": sum(pools) / largest if largest else None,
            }
        )
    return rows


def device_row(
    device: torch.device,
    graphs: Sequence[dict[str, Any]],
    before: DeviceBefore,
    persistent: int | None,
) -> dict[str, Any]:
    """One device: what was free before the models were loaded, what took it, what is left, and a sentence that says so.

    Args:
        persistent: bytes of tensors that live outside the pools: weights, states, buffers, cuBLAS's workspaces.
    """
    here = [row for row in graphs if row["device"] == str(device)]
    captured = device.type == "cuda" and any(row["nodes"] is not None or row["pool_bytes"] is not None for row in here)
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (None, None)
    row = {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "ceiling_tflops": before.ceiling_tflops,
        "fp8_ceiling_tflops": before.fp8_ceiling_tflops,
        "graphs": len(here) if captured else 0,
        "total_bytes": total,
        "free_before_bytes": before.free_bytes,
        "persistent_bytes": persistent,
        "pool_bytes": total_of(here, "pool_bytes") if captured else None,
        "executable_bytes": total_of(here, "executable_bytes") if captured else None,
        "free_bytes": free,
        "guard_us_max": max(row["guard_us"] for row in here),
    }
    return {**row, "sentence": sentence(row, here)}


def sentence(row: dict[str, Any], graphs: Sequence[dict[str, Any]]) -> str:
    """What runs on a device, what it costs, what is left."""
    roles = ", ".join(dict.fromkeys(graph["lane"] for graph in graphs))
    if not row["graphs"]:
        return f"{row['device']}: {roles} run eagerly, as the profile says; nothing is captured."
    eager, replayed = (total_of(graphs, name) for name in ("eager_launches", "replay_launches"))
    ops = merged(graph["implementations"] for graph in graphs)
    named = "; ".join(f"{op} by {', '.join(names)}" for op, names in ops.items())
    return (
        f"{row['device']}, {row['name']}: {roles} run as {row['graphs']} graphs, {eager:,} launches in {replayed} "
        f"({named or 'no op with a choice'}). Tensors {bytes_text(row['persistent_bytes'])}, pools "
        f"{bytes_text(row['pool_bytes'])}, executables {bytes_text(row['executable_bytes'])}; "
        f"{bytes_text(row['free_bytes'])} of {bytes_text(row['total_bytes'])} are left."
    )


def check_ops(demanded: dict[str, str], graphs: Sequence[dict[str, Any]], allowed: Sequence[str]) -> None:
    """Compare what the target's graphs hold with what `capture.ops` demands.

    Args:
        demanded: op -> implementation.
        allowed: packages whose absence is accepted by name.
    Raises:
        CaptureError: an op is implemented otherwise.
    """
    targets = [row for row in graphs if row["step"] == "target"]
    if demanded and any(row["kernels"] is None for row in targets):
        raise CaptureError(
            "capture.ops: the captured graphs cannot be read, so what they hold is not known; pip install "
            "cuda-bindings, or remove capture.ops from the profile"
        )
    found = merged(row["implementations"] for row in targets)
    for op, wanted in demanded.items():
        if found.get(op) != [wanted] and wanted not in allowed:
            how = f"by {', '.join(found[op])}" if op in found else "by no kernel that is known for it"
            advice = f"{INSTALL[wanted]}, accept its absence (capture.allow_fallback), or " if wanted in INSTALL else ""
            raise CaptureError(
                f"capture.ops: the target's graphs implement {op} {how}, the profile demands {wanted}; {advice}write "
                f"what is right in capture.ops.{op}, or remove it"
            )


def merged(implementations: Any) -> dict[str, list[str]]:
    """Op -> implementations, over several graphs."""
    found: dict[str, set[str]] = {}
    for row in implementations:
        for op, names in (row or {}).items():
            found.setdefault(op, set()).update(names)
    return {op: sorted(names) for op, names in sorted(found.items())}


def total_of(rows: Sequence[dict[str, Any]], name: str) -> int:
    """A sum that takes what was not measured as nothing."""
    return sum(row[name] or 0 for row in rows)
