"""The kernels compile for each supported card without one, and every tile fits its shared memory.

A tile's shared memory grows with head_dim, so each tile is compiled at the largest head_dim that it serves.
The interpreter of the other kernel tests is switched on for a whole process, so the compiler runs in one of its own:
this file, as a script.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

# Shared memory that one block may use, in KiB, by compute capability.
SHARED_KIB = {80: 163, 90: 227, 120: 99}


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[int, subprocess.Popen]]:
    """One compiler process per card, side by side: they are the longest part of the suite."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"  # the compiler's default, which it warns about when left unsaid
    started = {}
    for capability in SHARED_KIB:
        command = [sys.executable, "-W", "error", __file__, str(capability)]
        started[capability] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_kernel_fits_the_shared_memory_of(capability: int, compilers: dict[int, subprocess.Popen]) -> None:
    output, errors = compilers[capability].communicate()
    assert compilers[capability].returncode == 0, errors
    shared_bytes = json.loads(output)
    too_large = {name: size for name, size in shared_bytes.items() if size > SHARED_KIB[capability] * 1024}
    assert shared_bytes and not too_large


def compile_anchor_attention(capability: int) -> dict[str, int]:
    """Shared memory in bytes of each kernel, element size, head_dim and kind of layer."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from draftgraph.kernels import anchor_attention_kernels as kernels
    from draftgraph.kernels.anchor_attention import HOPPER_TILES, TILES, launch

    shared_bytes = {}
    table = TILES | HOPPER_TILES if capability == 90 else TILES
    largest = {(key[0], table[key]): key[1] for key in sorted(table)}
    layers = [((element_size, head_dim), 2048) for (element_size, _), head_dim in largest.items()]
    layers.append(((2, 64), None))
    for (element_size, head_dim), window in layers:
        tiles = table[element_size, head_dim]
        types = {"lse": "*fp32", "delta": "*fp32", "positions": "*i32", "valid": "*i1", "S": "i32", "A": "i32"}
        types |= {"scale": "fp32"}
        for kernel, tile in (
            (kernels.anchor_forward_kernel, tiles.forward),
            (kernels.anchor_query_gradient_kernel, tiles.query_gradient),
            (kernels.anchor_context_gradient_kernel, tiles.context_gradient),
            (kernels.anchor_block_gradient_kernel, tiles.block_gradient),
        ):
            shape = {"H": 32, "G": 8, "C": head_dim, "DRAFT_BLOCK": 16, "WINDOW": window, "ALL_ANCHORS": 512}
            shape["RULE"] = "served"
            _, _, constants = launch(tile, shape | {"BLOCK_N": tile.block_n})
            options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
            types |= dict.fromkeys(constants, "constexpr")
            names = kernel.arg_names
            signature = {name: types.get(name, "*bf16" if element_size == 2 else "*fp32") for name in names}
            # A launch sees that addresses and sizes are multiples of 16: without it loads are narrow and not staged.
            aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name in ("S", "A")]
            source = ASTSource(
                kernel,
                signature,
                {name: constants[name] for name in names if name in constants},
                {(i,): [["tt.divisibility", 16]] for i in aligned},
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            shared_bytes[f"{kernel.__name__} {element_size} {head_dim} {window}"] = compiled.metadata.shared
    return shared_bytes


def compile_cross_entropy(capability: int) -> dict[str, int]:
    """Shared memory in bytes of each kernel and element size."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from draftgraph.kernels import cross_entropy as kernels

    shared_bytes = {}
    pointers = {"labels": "*i64", "best": "*i64", "cross_entropy": "*fp32", "log_sum": "*fp32", "weights": "*fp32"}
    pointers |= {"divergence": "*fp32", "other_best": "*i64"}
    for dtype, element_size in (("bf16", 2), ("fp32", 4)):
        row = {"BLOCK_N": kernels.BLOCK_N, "STAGES": kernels.STAGES[element_size]}
        two_rows = {**row, "GRADIENT_BLOCK_N": kernels.GRADIENT_BLOCK_N}
        for kernel, constants, num_warps in (
            (kernels.softmax_statistics_kernel, row, kernels.NUM_WARPS),
            (kernels.cross_entropy_gradient_kernel, row, kernels.NUM_WARPS),
            (kernels.softmax_gradient_kernel, {"BLOCK_N": kernels.GRADIENT_BLOCK_N}, kernels.GRADIENT_NUM_WARPS),
            (kernels.divergence_gradient_kernel, two_rows, kernels.NUM_WARPS),
        ):
            logits = dict.fromkeys(("logits", "others"), f"*{dtype}")
            types = {**pointers, **logits, "V": "i32"} | dict.fromkeys(constants, "constexpr")
            names = kernel.arg_names
            aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in (*logits, "V") if n in names}
            source = ASTSource(kernel, {name: types[name] for name in names}, constants, aligned)
            target = GPUTarget("cuda", capability, 32)
            compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
            shared_bytes[f"{kernel.__name__} {dtype}"] = compiled.metadata.shared
            # A row is on its way while it is computed: without it the kernel waits for every tile.
            assert ("cp.async" in compiled.asm["ptx"]) == ("STAGES" in constants), kernel.__name__
    return shared_bytes


def compile_adamw(capability: int) -> dict[str, int]:
    """Shared memory in bytes with and without a low-precision copy; every access must be 16 bytes, the bf16 one 8."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from draftgraph.kernels import adamw

    shared_bytes = {}
    names = adamw.adamw_kernel.arg_names
    numbers = dict.fromkeys(("rest1", "rest2", "eps", "weight_decay"), "fp32")
    for dtype in ("*bf16", "constexpr"):
        types = numbers | {"values": dtype, "size": "i32", "BLOCK_N": "constexpr"}
        signature = {name: types.get(name, "*fp32") for name in names}
        constants = {"BLOCK_N": adamw.BLOCK_N} | ({"values": None} if dtype == "constexpr" else {})
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(names.index("size") + 1) if names[i] not in constants}
        source = ASTSource(adamw.adamw_kernel, signature, constants, aligned)
        options = {"num_warps": adamw.NUM_WARPS}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        shared_bytes[f"adamw_kernel {dtype}"] = compiled.metadata.shared
        wide = [compiled.asm["ptx"].count(f"{kind}.global.v4.b32") for kind in ("ld", "st")]
        assert wide == [4, 4], wide
    return shared_bytes


def compile_fused(capability: int) -> dict[str, int]:
    """Shared memory in bytes of the fused elementwise kernels in bfloat16, with every optional input."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from draftgraph.kernels import causal_conv, fp8, gates, rms_norm, rope, swiglu

    jobs: list = []
    for size in (64, 1024, 5120):
        for kernel, (constants, num_warps) in (
            (rms_norm.rms_norm_kernel, rms_norm.tile(size)),
            (rms_norm.rms_norm_gradient_kernel, rms_norm.gradient_tile(size, 2)),
        ):
            plain = {"scales": None} if kernel is rms_norm.rms_norm_kernel else {}
            jobs.append((kernel, constants | plain | {"ZERO_CENTRED": True}, num_warps))
    for head_dim, rotary_dim in ((64, 64), (128, 128), (256, 64)):
        constants = {"ZERO_CENTRED": True, "HEADS": 24, **rope.tile(head_dim, rotary_dim)}
        jobs += [(k, constants, rope.NUM_WARPS) for k in (rope.norm_rope_kernel, rope.norm_rope_gradient_kernel)]
    for kernel in (swiglu.swiglu_kernel, swiglu.swiglu_gradient_kernel):
        jobs.append((kernel, {"BLOCK_F": swiglu.BLOCK_F}, swiglu.NUM_WARPS))
    heads = {"C": 128, "NORMALISE": True, "BLOCK_C": 128, "BLOCK_S": 32}
    jobs += [(gates.gate_kernel, heads, 4), (causal_conv.causal_conv_kernel, {**heads, "WIDTH": 4}, 4)]
    if capability >= 89:  # what has products in FP8
        row = {"BLOCK_N": fp8.BLOCK_N}
        jobs += [(fp8.quantise_rows_kernel, row | {"GATED": gated}, fp8.NUM_WARPS) for gated in (False, True)]
        constants, num_warps = rms_norm.tile(5120)
        jobs.append((rms_norm.rms_norm_kernel, constants | {"ZERO_CENTRED": True}, num_warps))
    others = {"positions": "*i64", "cos": "*fp32", "sin": "*fp32", "partial": "*fp32", "eps": "fp32"}
    others |= dict.fromkeys(("M", "D", "P", "F", "S"), "i32")
    shared_bytes = {}
    for kernel, constants, num_warps in jobs:
        names = kernel.arg_names
        numbers = {name: "i32" for name in names if name.endswith("stride")}
        types = others | numbers | dict.fromkeys(constants, "constexpr")
        if "scales" in names and "scales" not in constants:
            types |= {"scales": "*fp32", "values" if "values" in names else "normed": "*fp8e4nv"}
        signature = {name: types.get(name, "*bf16") for name in names}
        aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or signature[name] == "i32"]
        source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
        shared_bytes[f"{kernel.__name__} {constants}"] = compiled.metadata.shared
    return shared_bytes


if __name__ == "__main__":
    card = int(sys.argv[1])
    jobs = (compile_anchor_attention, compile_cross_entropy, compile_adamw, compile_fused)
    print(json.dumps({name: size for job in jobs for name, size in job(card).items()}))
