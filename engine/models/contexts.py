"""What a model is made in: silence, and a device and dtype for new tensors."""

import logging
import warnings
from typing import Any

import torch
import transformers


class quiet:
    """Silence the progress bars and advice of what loads a model; ours is the only bar."""

    def __enter__(self) -> None:
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        # NOTE: with warnings as errors, one raised while fla imports would make transformers fall back silently.
        warnings.simplefilter("ignore")
        self.level = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity(logging.ERROR)
        transformers.logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers.logging.set_verbosity(self.level)
        transformers.logging.enable_progress_bar()
        self.warnings.__exit__(None, None, None)


class device_defaults:
    """New tensors on `device` in `dtype`: a large random model is made where it lives."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device

    def __enter__(self) -> None:
        self.previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        self.device.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.device.__exit__(*error)
        torch.set_default_dtype(self.previous)
