"""Where in the code something happened, in one line: the innermost frames that are not torch's or Python's own."""

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

_OUTSIDE = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), str(Path(__file__).parent / "syncs.py"))


def innermost(frames: Sequence[traceback.FrameSummary], limit: int = 1) -> str:
    """The last `limit` frames, innermost first, such as "loss.py:75 `logits = x @ w`".

    Args:
        frames: outermost first, as `traceback.extract_stack` gives them.
    """
    ours = [frame for frame in frames if not frame.filename.startswith(_OUTSIDE)] or list(frames)
    return " <- ".join(f"{Path(f.filename).name}:{f.lineno} `{f.line or f.name}`" for f in reversed(ours[-limit:]))
