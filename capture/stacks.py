"""Where in the code something happened, in one line: the innermost frames that are not torch's or Python's own."""

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

_TORCH, _STDLIB = str(Path(torch.__file__).parent), sysconfig.get_path("stdlib")
_SYNCS = str(Path(__file__).parent / "syncs.py")


def innermost(frames: Sequence[traceback.FrameSummary], limit: int = 1) -> str:
    """The last `limit` frames, innermost first, such as "loss.py:75 `logits = x @ w`".

    Args:
        frames: outermost first, as `traceback.extract_stack` gives them.
    """
    ours = [frame for frame in frames if _is_ours(frame.filename)] or list(frames)
    return " <- ".join(f"{Path(f.filename).name}:{f.lineno} `{f.line or f.name}`" for f in reversed(ours[-limit:]))


def _is_ours(filename: str) -> bool:
    # Installed packages may lie inside the standard library's folder.
    is_python = filename.startswith(_STDLIB) and "site-packages" not in filename and "dist-packages" not in filename
    return not is_python and not filename.startswith((_TORCH, _SYNCS))
