"""Sorts kernel names into families, so that a person can see what a graph holds.

Promises: every name has one family, Triton's plain names and C++'s mangled ones alike; and, where several packages
could have done the work, which one did. It knows names as they were seen in graphs on an H200, nothing about shapes.
"""

import re
from collections import Counter
from collections.abc import Mapping

OTHER = "other"

# The first pattern that is found decides: "flash" before "copy", since fused kernels name what they fuse.
_FAMILIES = [
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        (
            "gated_delta",
            r"gated_delta|chunk_fwd_kernel_o|recompute_w_u|chunk_local_cumsum|kkt_solve|gdn_gate",
        ),
        ("causal_conv", r"causal_conv"),
        ("attention", r"anchor_\w+_kernel|flash|fmha|sdpa|attention"),
        ("cross_entropy", r"softmax_(statistics|gradient)_kernel|cross_entropy|divergence_gradient"),
        ("quantise", r"quantise"),
        ("norm", r"rms_?norm|layer_?norm|l2norm|norm_rope|norm_gated|GammaBeta"),
        ("activation", r"swiglu|silu|sigmoid|gelu|\bgate_kernel"),
        ("optimizer", r"multi_tensor_apply|adam"),
        ("gemm", r"nvjet|gemm|cutlass|cublas|splitK|xmma|dot_kernel|gemv"),
        ("copy", r"copy|CatArray|FillFunctor|memcpy|memset|index_select|gather|scatter|embedding"),
        ("elementwise", r"elementwise|reduce_kernel|scan|cumsum|softmax|arange|distribution"),
    )
]

_IMPLEMENTATIONS = {
    "gated_delta": (("fla", re.compile(r".")),),
    "causal_conv": (
        ("causal_conv1d", re.compile(r"channellast|Causal_conv1d_fwd_kernel_traits", re.IGNORECASE)),
        ("fla", re.compile(r"causal_conv1d")),
        ("draftgraph", re.compile(r"causal_conv_kernel")),
    ),
    "attention": (
        ("anchor", re.compile(r"anchor_\w+_kernel")),
        ("cudnn", re.compile(r"cudnn")),
        ("efficient", re.compile(r"fmha_cutlass|AttentionKernel")),
        ("flash", re.compile(r"flash")),
    ),
    # Said where a product is in FP8: cuBLAS writes its operands as "qq", CUTLASS as their type.
    "gemm": (("fp8", re.compile(r"nvjet_\w*qq|e4m3|f8f8")),),
}


def family(kernel: str) -> str:
    """The family of a kernel's name."""
    return next((name for name, pattern in _FAMILIES if pattern.search(kernel)), OTHER)


def families(kernels: Mapping[str, int]) -> dict[str, int]:
    """Kernels per family, the most frequent first.

    Args:
        kernels: name -> how often a graph holds it.
    """
    counts: Counter[str] = Counter()
    for kernel, count in kernels.items():
        counts[family(kernel)] += count
    return dict(counts.most_common())


def implementations(kernels: Mapping[str, int]) -> dict[str, list[str]]:
    """Who implements the ops that have more than one implementation: family -> names, as its kernels show."""
    found: dict[str, set[str]] = {}
    for kernel in kernels:
        known = _IMPLEMENTATIONS.get(family(kernel), ())
        name = next((name for name, pattern in known if pattern.search(kernel)), None)
        if name:
            found.setdefault(family(kernel), set()).add(name)
    return {name: sorted(found[name]) for name in sorted(found)}
