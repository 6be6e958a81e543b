"""The choices that Triton's autotuners made, saved and restored: tuning is a part of the bits.

Two processes that time the same candidates may choose differently, and another tile sums in another order. So a run
saves what its warm-up chose, and a resume restores it; a kernel that had to choose anew is an error, not a surprise.
Covers every autotuner of the named packages (fla's). Triton keeps choices in its own disk cache as well, which may be
wiped or belong to another machine: it is a cache, not a record.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftgraph.capture.errors import CaptureFailure

PACKAGES = ("fla",)

Choices = dict[str, dict[str, dict[str, Any]]]  # kernel -> tuning key as JSON -> configuration


def choices() -> Choices:
    """What was chosen so far in this process."""
    return {
        name: {_text(key): _fields(config) for key, config in sorted(tuner.cache.items(), key=lambda i: _text(i[0]))}
        for name, tuner in sorted(_autotuners())
        if tuner.cache
    }


def save(path: Path) -> None:
    """Write the choices of this process as JSON; nothing where nothing chose."""
    if found := choices():
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.replace(path)


def restore(path: Path) -> Choices:
    """Make this process choose as the one that saved; to be called before a kernel runs.

    Returns:
        What was restored, for `refuse_new`.
    Raises:
        CaptureFailure: the file is damaged.
    """
    from triton import Config

    try:
        saved: Choices = json.loads(path.read_text())
        for module in {name.rpartition(".")[0] for name in saved}:
            # NOTE: the file lies in a run folder: it may load the kernels it is about, and nothing else.
            if module.split(".")[0] in PACKAGES:
                with suppress(ImportError):  # of another version: `refuse_new` tells
                    importlib.import_module(module)
        for name, tuner in _autotuners():
            for key, fields in saved.get(name, {}).items():
                tuner.cache[_tuple(json.loads(key))] = Config(**fields)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CaptureFailure(
            f"cannot read what kernels tuned themselves to from {path}: {error!r}. Remove the file to tune anew: "
            "the run then goes on, but perhaps not to the same bits"
        ) from error
    return saved


def refuse_new(saved: Choices) -> None:
    """Raise CaptureFailure where a kernel chose something else than `saved` holds."""
    for name, found in choices().items():
        for key, fields in found.items():
            if saved.get(name, {}).get(key) != fields:
                raise CaptureFailure(
                    f"kernel {name} was tuned anew for {key}: the saved run holds another choice for it or none, so "
                    "going on could change the bits. Use the same versions of torch, triton and fla, the same GPU and "
                    "the same buckets; or remove tuning.json from the run folder, and accept other bits"
                )


def _autotuners() -> Iterator[tuple[str, Any]]:
    """Every autotuned kernel of the packages that is imported, with a name that does not depend on the process."""
    if "triton" not in sys.modules:
        return
    from triton.runtime.autotuner import Autotuner

    seen: set[int] = set()
    for module_name, module in sorted(sys.modules.items()):
        if module_name.split(".")[0] not in PACKAGES:
            continue
        for value in list(vars(module).values()):
            # A kernel may be wrapped, in heuristics for instance.
            while value is not None and not isinstance(value, Autotuner):
                value = getattr(value, "fn", None) if type(value).__module__.startswith("triton") else None
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                yield f"{value.base_fn.__module__}.{value.base_fn.__qualname__}", value


def _fields(config: Any) -> dict[str, Any]:
    return {
        "kwargs": config.kwargs,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "num_ctas": config.num_ctas,
        "maxnreg": config.maxnreg,
    }


def _text(key: Any) -> str:
    return json.dumps(key)


def _tuple(value: Any) -> Any:
    return tuple(_tuple(v) for v in value) if isinstance(value, list) else value
