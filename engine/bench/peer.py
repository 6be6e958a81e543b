"""The peers: SpecForge's step in a process of its own, flex_attention in ours. Both are scripts of profiles/peers."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from draftgraph.engine.bench.protocol import Bench
from draftgraph.engine.errors import UsageError
from draftgraph.profiles.load import PEERS
from draftgraph.profiles.measure import receipt

SAME = ("gpu", "driver", "torch", "triton", "transformers", "fla", "quick")


def earlier(folder: Path, workloads: Iterable[str], quick: bool) -> dict[str, dict[int, dict[str, Any]]]:
    """The peer's figures in the receipts of `folder`, by workload and rows, each with the date of its receipt.

    Raises:
        UsageError: a receipt is missing, holds no peer, or is of another GPU or other versions.
    """
    found = {}
    for name in workloads:
        path = folder / f"bench-{name}.json"
        try:
            content = json.loads(path.read_text())
            lines = content["peer"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--peer-from: no receipt in {path}: {error}; measure {name} there first") from error
        here = receipt(name, "") | {"quick": quick}
        pairs = [(field, content.get(field), here[field]) for field in SAME]
        other = [f"{field} {there}, here {now}" for field, there, now in pairs if there != now]
        if other:
            raise UsageError(f"--peer-from: {path} is no measurement of the same: {'; '.join(other)}")
        if not lines:
            raise UsageError(f"--peer-from: {path} was measured without the peer")
        found[name] = {int(rows): line | {"date": content["date"]} for rows, line in lines.items()}
    return found


def specforge(
    bench: Bench, workload: str, shapes: str, rows: list[int], total_rows: int, full: bool = False
) -> dict[int, dict[str, Any]]:
    """Run peer_specforge.py; the device must be free, it takes more than 100 GiB at 27B shapes.

    Args:
        rows: of a micro-step; it runs once for each number.
    Returns:
        Its JSON lines, by rows. What is missing did not run, with the reason printed.
    """
    if workload in bench.known_peers:
        bench.say("the peer: as measured earlier")
        return bench.known_peers[workload]
    if not bench.on_gpu:
        bench.say("the peer: not run without a GPU")
        return {}
    if importlib.util.find_spec("specforge") is None:
        bench.say("the peer: not run, specforge is not installed (pip install --no-deps specforge==0.2.0)")
        return {}
    found = {}
    for number in rows:
        bench.say(f"the peer: {number} rows in a micro-step, {total_rows} rows")
        # -P: the folder of the script is no place to import from.
        command = [sys.executable, "-P", str(PEERS / "peer_specforge.py"), "--shapes", shapes, "--rows", str(number)]
        command += ["--total-rows", str(total_rows), *(["--full"] if full else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            bench.say(f"the peer: no figures, it ended with status {done.returncode}; its error is above")
        else:
            found[number] = json.loads(done.stdout.splitlines()[-1])
    return found


def flex() -> ModuleType:
    """The script, loaded by its path: it compiles, which nothing of the package may."""
    spec = importlib.util.spec_from_file_location("draftgraph_flex_peer", PEERS / "flex_attention.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
