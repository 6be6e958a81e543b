"""A fused forward of the target: the same layers in fewer, wider kernels, from the module's own parameters.

What the families share: joined GEMMs, the residual stream, the MLP, the taps. Promises: nothing runs that the taps do
not need; no mask, no cache, no wait; the untouched module still computes the same from the same memory.
Where rounding differs from the module (in float32 they agree to 1e-5): the module rounds after each elementwise op,
here each fused kernel (sum and norm, norm and rotation, SwiGLU, gate) computes in float32 and rounds its results once;
rotary tables stay in float32; the residual stream is rounded once per sum, as in the module.
In FP8 (`quantised`) every product takes weights that were quantised once and rows that the kernel before it quantised;
what is not a product stays as it is, and the module's own weights are given up.
Does not do: windows shorter than the context (the module's loop does them), dropout, gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftgraph.engine.errors import CaptureError
from draftgraph.engine.models.stacked_linear import stack
from draftgraph.kernels import fused as kernels
from draftgraph.kernels import reference
from draftgraph.kernels.reference import Quantised

# Largest relative difference of one layer's output, per token, from the module's own on PyTorch twins: roundings of
# float32 to TF32 in fla's tensor-core products, of bfloat16 in everything. A wrong layer differs by 0.1 and more.
ALLOWED = {torch.float32: 1e-2, torch.bfloat16: 5e-2}


class Projection:
    """Linear layers over one input as one GEMM."""

    def __init__(self, *layers: nn.Linear):
        self.sizes = [layer.out_features for layer in layers]
        self.weight = join([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else join([layer.bias for layer in layers])

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all layers, side by side."""
        return self(x).split(self.sizes, -1)


class QuantisedProjection:
    """The same in FP8. The layers' own weights are empty afterwards.

    Raises:
        CaptureError: the device's products in FP8 do not take these sizes.
    """

    def __init__(self, ops: Any, *layers: nn.Linear):
        self.ops, self.sizes, self.dtype = ops, [layer.out_features for layer in layers], layers[0].weight.dtype
        whole = Projection(*layers)
        if whole.weight.is_cuda and any(size % 16 for size in whole.weight.shape):
            raise CaptureError(
                f"a product of {whole.weight.shape[1]} to {len(whole.weight)} features is not possible in FP8: both "
                'must be multiples of 16; write target.precision = "own"'
            )
        self.weight, self.bias = ops.quantise_rows(whole.weight), whole.bias
        for layer in layers:
            layer.weight.data = layer.weight.new_empty(0)

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        x = x if isinstance(x, Quantised) else self.ops.quantise_rows(x)
        return self.ops.scaled_linear(x, self.weight, self.bias, self.dtype)

    def split(self, x: Tensor | Quantised) -> tuple[Tensor, ...]:
        return self(x).split(self.sizes, -1)


# What makes the products of a forward out of linear layers.
Project = Callable[..., Projection | QuantisedProjection]


def join(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows; the parameters become views of it, so that nothing is held twice.

    Parameters that lie below each other already (a second forward over one module) stay where they are.
    """
    joined = stack(tuple(parameter.detach().view(len(parameter), -1) for parameter in parameters))
    for parameter, rows in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = rows.view(parameter.shape)
    return joined.view(-1, *parameters[0].shape[1:])


class Mlp:
    """SwiGLU, its gate and up projections in one GEMM."""

    def __init__(self, module: Any, project: Project, swiglu: Callable[[Tensor], Any]):
        self.gate_up, self.down = project(module.gate_proj, module.up_proj), project(module.down_proj)
        self.swiglu = swiglu

    def __call__(self, x: Any) -> Tensor:
        return self.down(self.swiglu(self.gate_up(x)))


# cos and sin, [max_context, rotary dims] float32, and the row of each token, [S].
Rotary = tuple[Tensor, Tensor, Tensor]
# What mixes the tokens of a layer: normed hidden states [R, S, D], perhaps quantised, in, [R, S, D] out.
Mixer = Callable[[Any, Rotary], Tensor]


class FusedForward:
    """Extraction of the tapped layers by fused kernels; one subclass per kind of family.

    Args:
        decoder: text decoder of transformers, on its device, frozen.
        target_layer_ids: ascending.
        max_context: the largest S.
        final: run to the last layer, and extract its output after the final norm behind the taps.
        quantised: in FP8; afterwards the decoder's linear layers have no weights.
    Owns: rotary tables; the joined weights, of which the module's parameters become views.
    """

    zero_centred = False  # are the norms' weights 1 + w

    def __init__(
        self,
        decoder: Any,
        target_layer_ids: tuple[int, ...],
        max_context: int,
        final: bool = False,
        quantised: bool = False,
    ):
        self.quantised = quantised
        self.embedding, self.target_layer_ids = decoder.embed_tokens, target_layer_ids
        self.family, self.eps = decoder.config.model_type, decoder.config.rms_norm_eps
        device = self.embedding.weight.device
        if device.type == "cuda":
            self.require_packages()
        self.ops: Any = kernels if device.type == "cuda" else reference
        self.project: Project = functools.partial(QuantisedProjection, self.ops) if quantised else Projection
        ending = "_quantised" if quantised else ""
        self.rms_norm = getattr(self.ops, f"rms_norm{ending}")
        self.add_rms_norm = getattr(self.ops, f"add_rms_norm{ending}")
        swiglu = getattr(self.ops, f"swiglu{ending}")
        self.positions = torch.arange(max_context, device=device)
        # M-RoPE of text: the same position on all three axes.
        axes = (3, 1, -1) if hasattr(decoder.rotary_emb, "mrope_section") else (1, -1)
        example = torch.empty(1, 1, 1, device=device, dtype=torch.float32)
        with torch.no_grad():
            self.cos, self.sin = (x[0].contiguous() for x in decoder.rotary_emb(example, self.positions.expand(axes)))
        self.layers, self.norms = [], []
        self.final_norm = decoder.norm.weight.detach() if final else None
        for layer in decoder.layers[: len(decoder.layers) if final else max(target_layer_ids) + 1]:
            self.layers.append((self.mixer(layer), Mlp(layer.mlp, self.project, swiglu)))
            self.norms.append((layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()))
            if device.type == "cuda":
                # What was joined lay in blocks of its own, too small for the next layer's.
                torch.cuda.empty_cache()

    def require_packages(self) -> None:
        """Refuse a GPU where a package that the family's kernels need is missing."""

    def mixer(self, layer: Any) -> Mixer:
        raise NotImplementedError

    def resolved_ops(self) -> dict[str, str]:
        """What the evidence names: this forward, and the functions of other packages under it."""
        named = {"forward": f"{type(self).__module__}.{type(self).__qualname__}"}
        linear = self.ops.scaled_linear
        return {**named, "linear": f"{linear.__module__}.{linear.__qualname__}"} if self.quantised else named

    @torch.no_grad()
    def extract(self, input_ids: Tensor, taps: Tensor) -> None:
        """Write the outputs of the tapped layers; arguments as in `Target.extract`."""
        rotary = (self.cos, self.sin, self.positions[: input_ids.shape[1]])
        x = self.embedding(input_ids)
        size = x.shape[-1]
        normed = self.rms_norm(x, self.norms[0][0], self.eps, self.zero_centred)
        last = len(self.layers) - 1
        for i, (mixer, mlp) in enumerate(self.layers):
            normed, x = self.add_rms_norm(mixer(normed, rotary), x, self.norms[i][1], self.eps, self.zero_centred)
            out = mlp(normed)
            if i == last and self.final_norm is None:
                torch.add(x, out, out=taps[..., -size:])
                return
            if i == last:
                normed, x = self.ops.add_rms_norm(out, x, self.final_norm, self.eps, self.zero_centred)
                taps[..., -size:].copy_(normed)
                return
            normed, x = self.add_rms_norm(out, x, self.norms[i + 1][0], self.eps, self.zero_centred)
            if i in self.target_layer_ids:
                n = self.target_layer_ids.index(i)
                taps[..., n * size : (n + 1) * size].copy_(x)

    def layer(self, i: int, x: Tensor) -> Tensor:
        """Layer i alone: its input [R, S, D] to its output; of the last one after the final norm, where that is run."""
        mixer, mlp = self.layers[i]
        normed = self.rms_norm(x, self.norms[i][0], self.eps, self.zero_centred)
        mixed = mixer(normed, (self.cos, self.sin, self.positions[: x.shape[1]]))
        normed, x = self.add_rms_norm(mixed, x, self.norms[i][1], self.eps, self.zero_centred)
        x = x + mlp(normed)
        if self.final_norm is not None and i == len(self.layers) - 1:
            return self.ops.rms_norm(x, self.final_norm, self.eps, self.zero_centred)
        return x

    def check_against_module(self, input_ids: Tensor, states: Sequence[Tensor]) -> None:
        """Each layer with the module's on the module's own input, and the taps with a chain of these layers.

        Layer by layer, because rounding adds up over layers until it hides a mistake.

        Args:
            states: the module's hidden states, before the first layer and after each; the last after the final norm.
        Raises:
            CaptureError: a fused layer does not compute what the module's does.
        """
        x, tapped = states[0], []
        for i in range(len(self.layers)):
            self.require_close(self.layer(i, states[i]), states[i + 1], f"layer {i}")
            x = self.layer(i, x)
            if i in self.target_layer_ids or (self.final_norm is not None and i == len(self.layers) - 1):
                tapped.append(x)
        expected = torch.cat(tapped, -1)
        taps = torch.empty_like(expected)
        self.extract(input_ids, taps)
        self.require_close(taps, expected, "the chain of layers")

    def require_close(self, found: Tensor, expected: Tensor, part: str) -> None:
        difference, allowed = worst_token_difference(found, expected).item(), ALLOWED[found.dtype]
        if not difference <= allowed:
            raise CaptureError(
                f"the fused forward of target family {self.family!r} differs from its module in {part} by "
                f'{difference:.1e} (allowed {allowed:.0e}); write target.forward = "module", and report it'
            )


def token_differences(found: Tensor, expected: Tensor) -> Tensor:
    """Of each token: in many models the first one is so large that it would hide the others."""
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def worst_token_difference(found: Tensor, expected: Tensor) -> Tensor:
    return token_differences(found, expected).max()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [R, S, H, C] over [R, S, G, C], scaled by C ** -0.5; [R, S, H, C], heads in any order."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
