"""The errors of this room: something could not be captured, replayed or verified. The caller translates them."""

import torch


class CaptureFailure(Exception):
    """A readable message: which step and bucket, what happened, what to change."""


class DeviceMemoryExhausted(CaptureFailure):
    """A step did not fit into `device`. What to make smaller, the caller knows."""

    def __init__(self, message: str, device: torch.device) -> None:
        super().__init__(message)
        self.device = device
