"""Persistent buffers: the inputs and taps of one micro-batch, sized for the largest bucket, viewed by every bucket.

Promises: nothing is allocated after construction; a view keeps its address for the life of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftgraph.engine.data.buckets import Bucket
from draftgraph.engine.data.collate import SlotLayout


@dataclass(frozen=True)
class BatchViews:
    """One bucket's window onto a BatchBuffer."""

    input_ids: Tensor  # [R, S] int64
    loss_mask: Tensor  # [R, S] uint8
    lengths: Tensor  # [R] int32
    anchor_positions: Tensor  # [reuse, R, A] int32
    anchor_valid: Tensor  # [reuse, R, A] bool
    taps: Tensor  # [R, S, N*D]

    def inputs(self) -> dict[str, Tensor]:
        return dict(vars(self))


class BatchBuffer:
    """Bytes as the data process wrote them, and the taps that the target adds, on one device.

    Args:
        layouts: bucket -> byte layout of its micro-batches.
        taps_size: N*D.
    """

    def __init__(self, layouts: Mapping[Bucket, SlotLayout], taps_size: int, dtype: torch.dtype, device: torch.device):
        self.raw = torch.zeros(max(layout.num_bytes for layout in layouts.values()), dtype=torch.uint8, device=device)
        self.taps = torch.zeros(max(b.rows * b.context for b in layouts) * taps_size, dtype=dtype, device=device)
        self.views = {bucket: self.view(bucket, layout, taps_size) for bucket, layout in layouts.items()}
        self.num_bytes = {bucket: layout.num_bytes for bucket, layout in layouts.items()}

    def view(self, bucket: Bucket, layout: SlotLayout, taps_size: int) -> BatchViews:
        fields = {}
        for name, (dtype_name, shape, offset) in layout.fields.items():
            dtype = getattr(torch, dtype_name)
            extent = torch.Size(shape).numel() * dtype.itemsize
            fields[name] = self.raw[offset : offset + extent].view(dtype).view(shape)
        fields["anchor_valid"] = fields["anchor_valid"].view(torch.bool)
        taps = self.taps[: bucket.rows * bucket.context * taps_size].view(bucket.rows, bucket.context, taps_size)
        return BatchViews(taps=taps, **fields)

    def read_host(self, bucket: Bucket, host: Tensor) -> None:
        """Copy a host slot's bytes of one bucket; asynchronous where `host` is pinned. One copy."""
        n = self.num_bytes[bucket]
        self.raw[:n].copy_(host[:n], non_blocking=True)

    def read(self, bucket: Bucket, other: "BatchBuffer") -> None:
        """Copy one bucket's inputs and taps from another buffer, on the current streams. Two copies."""
        n, taps = self.num_bytes[bucket], self.views[bucket].taps.numel()
        self.raw[:n].copy_(other.raw[:n], non_blocking=True)
        self.taps[:taps].copy_(other.taps[:taps], non_blocking=True)
