"""Real weights: read as transformers reads them, one tensor at a time, and what does not fit is named."""

import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny import tiny_profile, write_target

from draftgraph.engine.build import load_targets
from draftgraph.engine.errors import UsageError
from draftgraph.engine.models import target as models
from draftgraph.engine.models.target import Target, load_config, load_model
from draftgraph.engine.models.weights import STREAMED, checkpoint_files, weight_bytes
from draftgraph.engine.plan import make_plan
from draftgraph.engine.progress import progress_bar

CPU = torch.device("cpu")
TAPS = (1, 4)


def saved(tmp_path, family="llama", **extra):
    """A checkpoint of a random model in several shards."""
    model = load_model(write_target(tmp_path, family, **extra), torch.bfloat16, CPU)
    folder = tmp_path / family
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder, model


def rewrite(folder, change):
    """Apply a change to the tensors of every shard, {name: tensor} in and out, and to the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    places = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors = change(load_file(folder / file))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    index["weight_map"] = places
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("family", STREAMED)
def test_a_checkpoint_is_read_as_transformers_reads_it(tmp_path, family):
    folder, model = saved(tmp_path, family)
    assert len(checkpoint_files(str(folder))) > 3
    found = load_model(str(folder), torch.bfloat16, CPU)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert list(found.state_dict()) == list(expected.state_dict()) == list(model.state_dict())
    ours, theirs = ({**m.state_dict(), **dict(m.named_buffers())} for m in (found, expected))
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)
    tied = found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert tied == found.config.tie_word_embeddings and not any(p.requires_grad for p in found.parameters())


def nested(tensors):
    """As Qwen3.5 is published: the text decoder in a multimodal model, with a vision tower and an MTP head."""
    inner = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
    return inner | {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(3), "mtp.fc.weight": torch.zeros(2)}


@pytest.mark.parametrize("tied", [True, False])
def test_a_text_decoder_nested_in_a_multimodal_checkpoint_is_found(tmp_path, tied):
    folder, model = saved(tmp_path, "qwen3_5_text", tie_word_embeddings=tied)
    rewrite(folder, nested)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    assert load_config(str(folder)).model_type == "qwen3_5_text"
    found = load_model(str(folder), torch.bfloat16, CPU)
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_layers_after_the_last_tap_are_neither_read_nor_made(tmp_path):
    folder, model = saved(tmp_path, "qwen3", tie_word_embeddings=False)

    def damage(tensors):
        late = [name for name in tensors if name.startswith(("model.layers.5.", "model.norm."))]
        return {name: tensor[:1] if name in late else tensor for name, tensor in tensors.items()}

    rewrite(folder, damage)
    cut = load_model(str(folder), torch.bfloat16, CPU, last_layer=4)
    assert len(cut.get_decoder().layers) == 5
    target, whole = Target(cut, TAPS, 16), Target(model, TAPS, 16)
    target.check_against_module()
    taps = torch.empty(2, 1, 9, 64, dtype=torch.bfloat16)
    for each, out in zip((target, whole), taps, strict=True):
        each.extract(torch.arange(9)[None], out)
    assert torch.equal(taps[0], taps[1])
    size = sum(p.nbytes for p in cut.parameters())
    assert size == weight_bytes(model.get_decoder(), 4, 2, "own") < sum(p.nbytes for p in model.parameters())


DAMAGES = {
    "missing": (
        lambda t: {n: x for n, x in t.items() if "layers.2.mlp.up" not in n},
        "1 tensors missing, 0 wrong.*layers.2.mlp.up_proj.weight is missing",
    ),
    "cut": (
        lambda t: {n: x[:1] if "layers.2.mlp.up" in n else x for n, x in t.items()},
        r"layers.2.mlp.up_proj.weight has the shape \[1, 32\], expected \[64, 32\]",
    ),
    "another": (
        lambda t: {n.replace("layers.2.mlp.up", "layers.2.mlp.upper"): x for n, x in t.items()},
        "layers.2.mlp.upper_proj.weight belongs to nothing in LlamaForCausalLM",
    ),
    "quantised": (
        lambda t: {n: x.to(torch.float8_e4m3fn) if "layers.2.mlp.up" in n else x for n, x in t.items()},
        "layers.2.mlp.up_proj.weight is F8_E4M3: give the checkpoint that is not quantised",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, damage):
    change, message = DAMAGES[damage]
    folder, _ = saved(tmp_path)
    rewrite(folder, change)
    with pytest.raises(UsageError, match=message):
        load_model(str(folder), torch.bfloat16, CPU)


def test_a_shard_that_is_cut_short_or_gone_is_named(tmp_path):
    folder, _ = saved(tmp_path)
    shard = checkpoint_files(str(folder))[2]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-20])
    with pytest.raises(UsageError, match=f"cannot read .*{shard.name}.*fetch or convert it again"):
        load_model(str(folder), torch.bfloat16, CPU)
    shard.unlink()
    with pytest.raises(UsageError, match=shard.name):
        load_model(str(folder), torch.bfloat16, CPU)


def test_a_second_device_takes_a_copy_and_the_files_are_read_once(tmp_path, monkeypatch):
    folder, model = saved(tmp_path, "qwen3")
    reads = []
    read = models.read_weights
    monkeypatch.setattr(models, "read_weights", lambda *arguments: reads.append(read(*arguments)))
    first = load_model(str(folder), torch.bfloat16, CPU, last_layer=4)
    second = load_model(str(folder), torch.bfloat16, CPU, last_layer=4, source=first)
    assert reads == [sum(p.nbytes for p in first.parameters())]
    for (name, ours), theirs in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, model.state_dict()[name])
        assert ours.data_ptr() != theirs.data_ptr()


def test_a_run_says_what_was_loaded_and_how_long_it_took(tmp_path):
    folder, _ = saved(tmp_path)
    (tmp_path / "lengths.json").write_text('{"lengths": [9, 20, 40]}')
    data = {"shards": "", "random_lengths": str(tmp_path / "lengths.json")}
    plan, lines = make_plan(tiny_profile(tmp_path, target={"model": str(folder)}, data=data)), []
    with progress_bar(Console(quiet=True)) as progress:
        targets = load_targets(plan, [CPU, CPU], 64, lines.append, progress)
        assert list(targets) == [CPU] and not progress.tasks
    assert lines[0] == f"loading {folder} on cpu" and re.match(r"loaded .* KiB in \d+\.\d s", lines[1])


@pytest.mark.gpu
def test_weights_reach_a_gpu_and_are_copied_there(tmp_path):
    folder, model = saved(tmp_path, "qwen3_5_text")
    gpu = torch.device("cuda", 0)
    first = load_model(str(folder), torch.bfloat16, gpu)
    second = load_model(str(folder), torch.bfloat16, gpu, source=first)
    for name, tensor in model.state_dict().items():
        assert all(torch.equal(each.state_dict()[name].cpu(), tensor) for each in (first, second))


MEASURE = """
import re, sys, torch
from pathlib import Path
from draftgraph.engine.models.target import load_model

def memory(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

load_model(sys.argv[2], torch.float32, torch.device("cpu"))  # imports, and whatever else the first one costs
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
model = load_model(sys.argv[1], torch.bfloat16, torch.device("cpu"), last_layer=10)
print(memory("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_host_holds_one_tensor_beside_the_model(tmp_path):
    (tmp_path / "few").mkdir()
    few, _ = saved(tmp_path / "few")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 20_000}
    model = load_model(write_target(tmp_path, "llama", **sizes), torch.bfloat16, CPU)
    model.save_pretrained(tmp_path / "many", max_shard_size="60MB")
    assert len(checkpoint_files(str(tmp_path / "many"))) == 3
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(tmp_path / "many"), str(few)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    grown, held = map(int, done.stdout.split())
    largest = 20_000 * 512 * 2
    assert held < sum(p.nbytes for p in model.parameters())
    assert grown < held + 2 * largest, (grown - held) / largest
