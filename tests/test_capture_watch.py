"""The steady state on a CPU, where only compilations and captures can break it; test_gpu_drills.py has the rest."""

import os
import subprocess
import sys
import traceback
from pathlib import Path

from draftgraph.capture.stacks import innermost
from draftgraph.capture.watch import SteadyWatch

# In a process of its own: the tests run with Triton's interpreter, which compiles nothing.
COMPILES = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from draftgraph.capture.compilations import count_compilations
from draftgraph.capture.watch import SteadyWatch

@triton.jit
def fill_kernel(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), 1.0)

def compile_kernel(block):
    source = ASTSource(fill_kernel, {"out": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": block})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))

compile_kernel(32)
watch = SteadyWatch([])
watch.open(10)
with watch.steady():
    print(watch.mark(11))
    compile_kernel(64)
    compile_kernel(128)
    print(watch.mark(12))
    print(watch.mark(13))
with count_compilations() as found:
    compile_kernel(128)
    compile_kernel(256)
print(found.loaded, len(found.names), found.seconds > 0, sorted(found.report()))
print(watch.late_compilations, watch.host_syncs, watch.findings)
watch.close()
"""


def test_a_late_compilation_is_told_once_with_its_kernel_and_its_steps(tmp_path):
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    before, late, told, counted, total = result.stdout.splitlines()
    finding = (
        "steady state broken between step 11 and 12: Triton compiled or loaded 2 kernels: fill_kernel, fill_kernel"
    )
    assert before == told == "[]" and counted == "1 2 True ['from_disk_cache', 'kernels', 'seconds']"
    assert late == f"['{finding}']"
    assert total == f"2 None ['{finding}']"


def test_a_steady_run_has_no_findings():
    watch = SteadyWatch([])
    watch.open(0)
    with watch.steady():
        assert watch.mark(1) == []
    watch.close()
    assert (watch.findings, watch.late_compilations, watch.late_captures, watch.host_syncs) == ([], 0, 0, None)


def test_a_place_is_named_by_our_innermost_lines_not_by_torch_or_python():
    import torch

    frames = [
        traceback.FrameSummary("/somewhere/train.py", 1, "run", line="step()"),
        traceback.FrameSummary("/somewhere/loss.py", 7, "step", line="x = torch.empty(3)"),
        traceback.FrameSummary(str(Path(torch.__file__).parent / "functional.py"), 99, "empty", line="inner()"),
        traceback.FrameSummary(os.__file__, 3, "getenv", line="inner()"),
    ]
    assert innermost(frames) == "loss.py:7 `x = torch.empty(3)`"
    assert innermost(frames, limit=2) == "loss.py:7 `x = torch.empty(3)` <- train.py:1 `step()`"
