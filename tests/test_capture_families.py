"""Kernel names, as graphs and profilers on an H200 gave them, and what they are."""

import pytest

from draftgraph.capture.families import OTHER, families, family, implementations
from draftgraph.kernels import (
    adamw,
    anchor_attention_kernels,
    causal_conv,
    cross_entropy,
    fp8,
    gates,
    rms_norm,
    rope,
    swiglu,
)

SEEN = {
    "nvjet_sm90_tst_256x152_64x4_2x1_v_bz_coopA_TNT": "gemm",
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": "gated_delta",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "gated_delta",
    "chunk_fwd_kernel_o": "gated_delta",
    "recompute_w_u_fwd_kernel": "gated_delta",
    "l2norm_fwd_kernel": "norm",
    "anchor_context_gradient_kernel": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x256_4x1x1_kernel0_0": "attention",
    "void causal_conv1d_channellast_fwd_kernel<Causal_conv1d_channellast_fwd_kernel_traits<128, 4>>": "causal_conv",
    "causal_conv_kernel": "causal_conv",
    "gate_kernel": "activation",
    "norm_rope_kernel": "norm",
    "swiglu_kernel": "activation",
    "gdn_gate_chunk_cumsum_scalar_kernel": "gated_delta",
    "fused_beta_sigmoid_fwd_kernel": "activation",
    "softmax_gradient_kernel": "cross_entropy",
    "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float>": "norm",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)": "copy",
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_": "copy",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 4>": "copy",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>": "elementwise",
    "void at::native::vectorized_elementwise_kernel<8, at::native::silu_kernel(at::TensorIteratorBase&)>": "activation",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>": "elementwise",
    "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata>": "optimizer",
    "a_kernel_nobody_knows": "other",
}


@pytest.mark.parametrize(("name", "expected"), SEEN.items())
def test_a_kernel_seen_in_a_graph_has_its_family(name, expected):
    assert families({name: 3}) == {expected: 3}


def test_every_kernel_of_our_own_has_a_family():
    rooms = (adamw, anchor_attention_kernels, causal_conv, cross_entropy, fp8, gates, rms_norm, rope, swiglu)
    found = {name: family(name) for room in rooms for name in vars(room) if name.endswith("_kernel")}
    assert len(found) == 18 and OTHER not in found.values()
    assert {family(name) for name in vars(cross_entropy) if name.endswith("_kernel")} == {"cross_entropy"}


def test_products_in_fp8_are_named_and_what_quantises_is_a_family_of_its_own():
    products = ("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_TNT", "cutlass::gemm::f8f8bf16_rowwise<float_e4m3_t>")
    for name in products:
        assert families({name: 1}) == {"gemm": 1} and implementations({name: 1}) == {"gemm": ["fp8"]}
    assert families({"quantise_rows_kernel": 2, "rms_norm_kernel": 1}) == {"quantise": 2, "norm": 1}


def test_families_add_up_and_the_most_frequent_comes_first():
    assert list(families({"nvjet_a": 2, "nvjet_b": 3, "anchor_forward_kernel": 4}).items()) == [
        ("gemm", 5),
        ("attention", 4),
    ]


def test_kernels_show_which_package_implements_an_op():
    assert implementations(SEEN) == {
        "attention": ["anchor", "cudnn"],
        "causal_conv": ["causal_conv1d", "draftgraph"],
        "gated_delta": ["fla"],
    }
    assert implementations({"causal_conv1d_fwd_kernel": 1}) == {"causal_conv": ["fla"]}
    pytorch = "_ZN12pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traits"
    assert implementations({pytorch: 1, "nvjet_a": 1}) == {"attention": ["flash"]}
    efficient = (
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)"
    )
    assert implementations({efficient: 1}) == {"attention": ["efficient"]}
