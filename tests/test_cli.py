"""The command line: its frozen interface, and bad input as one readable message."""

import hashlib
import json
import re
import sys
from pathlib import Path

import jsonschema
import matplotlib
import pytest
import tomli_w
from test_data_template import chat_tokenizer
from tiny import profile_values, write_target

from draftgraph.engine.cli import main, parser
from draftgraph.profiles.load import WARMUP_SCHEMA

INTERFACE = {
    "prepare": [
        *("inputs", "--target", "--out", "--max-context", "--block-size", "--anchor-rule", "--json"),
        *("--format", "--mask", "--turns", "--thinking", "--tool-calls", "--show", "--max-bad-rows", "--strict"),
        *("--workers", "--show-rows"),
    ],
    "plan": ["profile", "--run", "--set", "--gpu", "--warmup", "--timeline", "--picture", "--json"],
    "warmup": ["profile", "--run", "--set", "--json"],
    "train": ["profile", "--run", "--set", "--resume", "--json"],
    "report": ["source", "--against", "--json"],
    "trace": ["profile", "--run", "--set", "--steps", "--node", "--json"],
    "eval": [
        *(
            "source",
            "--best",
            "--target",
            "--prompts",
            "--num-prompts",
            "--max-new-tokens",
            "--batch-size",
            "--temperature",
        ),
        *("--tree", "--dtype", "--untrained", "--json"),
    ],
    "export": ["source", "--best", "--out", "--format", "--target", "--json"],
    "regenerate": [
        *("prompts", "--target", "--out", "--max-new-tokens", "--batch-size", "--temperature", "--top-p", "--seed"),
        *("--server", "--server-model", "--concurrency", "--timeout", "--retries", "--api-key-env", "--json"),
    ],
    "bench": ["workloads", "--out", "--quick", "--peer-rows", "--peer-from", "--set", "--json"],
    "demo": ["--run", "--json"],
}


def commands():
    return parser()._subparsers._group_actions[0].choices


def test_the_interface_is_frozen():
    found = {
        name: {a.option_strings[0] if a.option_strings else a.dest for a in sub._actions} - {"-h"}
        for name, sub in commands().items()
    }
    assert found == {name: set(options) for name, options in INTERFACE.items()}


def test_every_command_teaches_with_an_example(capsys):
    for name, sub in commands().items():
        assert "draftgraph" in sub.format_help() and sub.epilog, name
    with pytest.raises(SystemExit) as exit_info:
        main([])
    assert exit_info.value.code == 2


def profile_file(tmp_path, **changes):
    path = tmp_path / "tiny.toml"
    path.write_text(tomli_w.dumps(profile_values(tmp_path, **changes)))
    return str(path)


def test_train_prints_the_whole_summary_as_the_last_line_of_stdout(tmp_path, capsys):
    status = main(["train", profile_file(tmp_path), "--run", str(tmp_path / "run"), "--set", "run.steps=2", "--json"])
    assert status == 0
    summary = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert set(summary) >= {
        "steps",
        "loss_first",
        "loss_last",
        "acceptance_before",
        "acceptance_after",
        "real_tokens_per_s",
        "padding_efficiency",
        "graphs",
        "replays",
        "alloc_bytes_per_step",
        "device_used_range_bytes",
        "host_syncs_per_step",
        "receipt",
    }
    receipt = json.loads(Path(summary["receipt"]).read_text())
    assert {
        "workload",
        "gpu",
        "driver",
        "torch",
        "triton",
        "commit",
        "date",
        "profile",
        "ours",
        "peer",
        "ratio",
    } <= set(receipt)


def test_plan_and_warmup_print_their_summaries(tmp_path, capsys):
    profile = profile_file(tmp_path)
    assert main(["plan", profile, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"buckets", "padding_efficiency", "device_bytes", "tokens_per_s", "split", "bound_by"} <= set(plan)
    assert main(["warmup", profile, "--run", str(tmp_path / "run"), "--json"]) == 0
    out, err = capsys.readouterr()
    warm = json.loads(out.splitlines()[-1])
    jsonschema.validate(warm, json.loads(WARMUP_SCHEMA.read_text()))
    assert json.loads((tmp_path / "run" / "warmup.json").read_text()) == warm
    assert "EAGERLY" in err and "do not apply" in err and warm["pool_bytes"] is None


def test_plan_draws_every_bucket_over_the_lengths(tmp_path, capsys, monkeypatch):
    profile, svg, png = profile_file(tmp_path), tmp_path / "buckets.svg", tmp_path / "buckets.png"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        assert main(["plan", profile, "--picture", str(svg), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["picture"] == str(svg) and len(plan["buckets"]) == 3
    for bucket in plan["buckets"]:
        assert f"r{bucket['rows']}-s{bucket['context']}-a{bucket['anchors']}" in svg.read_text()
    assert main(["plan", profile, "--picture", str(png), "--json"]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    status, err = failure(capsys, "plan", profile, "--picture", str(tmp_path / "buckets.gif"))
    assert status == 2 and ".svg or .png" in err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, err = failure(capsys, "plan", profile, "--picture", str(svg))
    assert status == 2 and "pip install -e '.[data]'" in err


def failure(capsys, *arguments):
    status = main(list(arguments))
    err = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in err
    return status, err


def test_bad_profiles_are_one_sentence_and_status_2(tmp_path, capsys):
    path = profile_file(tmp_path)
    for assignment, expected in [
        ("drafter.blok_size=8", "did you mean 'block_size'"),
        ("optimm.lr=1", "did you mean 'optim'"),
        ("run.steps=many", "run.steps takes int"),
        ("run.steps=0", "above 0"),
        ("drafter.block_size=17", "2 to 16"),
        ("capture.mode=graph", "needs a CUDA device"),
        ("run.seed=-1", "0 or more"),
        ("run.seed=99999999999999999999", "below 2,147,483,648"),
        ("optim.eps=nan", "finite number"),
        ("capture.ops={attentoin='cudnn'}", "did you mean 'attention'"),
        ("capture.ops={causal_conv='fla_conv'}", "capture.ops.causal_conv is one of causal_conv1d, fla, draftgraph"),
        ("capture.ops={attention=1}", "takes names"),
        ("capture.ops.attentoin=cudnn", "did you mean 'attention'"),
        ("capture.ops=cudnn", "takes a table of names"),
        ("capture.allow_fallback=['flaa']", "takes fla and causal_conv1d"),
        ("placement.targets=cpu", 'takes a list, such as ["cpu"]'),
        ("capture.watch=stric", "did you mean 'strict'"),
        ("optim.warmup=100", "from 0 to 1"),
        ("buckets.context_multiple=100", "above buckets.max_context"),
        ("optim.lr=inf", "finite number"),
        ("buckets.count=1000", "at most 64"),
        ("drafter.layers=2000000000", "drafter.layers is at most 128"),
        ("drafter.reuse=2000000000", "drafter.reuse is at most 128"),
        ("optim.accumulate=2000000000", "optim.accumulate is at most 8192"),
        ("placement.look_ahead=2000000000", "placement.look_ahead is at most 128"),
        ("drafter.taps=200", "drafter.taps (200) is too many for a target of"),
        ("checkpoint.every=-1", "0 or more"),
        ("placement.look_ahead=-1", "0 or more"),
        ("optim.betas=[0.9]", "two numbers"),
        ("drafter.head_dim=15", "must be even"),
        ("drafter.anchors=1000", "cannot hold one row"),
        ("buckets.max_context=500", "cannot hold one row"),
        ("placement.targets=['cuda:0']", "look_ahead"),
        ("data.random_lengths=x.json", "name the data once"),
        ("target.model=random:none", "no model shape"),
        ('data.shards="a\\u0000"', "data.shards holds a NUL character"),
        ("drafter.mask_token_id=500", "not a row of the target's embedding"),
        ("drafter.target_layer_ids=[9]", "ascending target layers"),
        ("steps=3", "section.key=value"),
    ]:
        status, err = failure(capsys, "plan", path, "--set", assignment)
        assert status == 2 and expected in err, (assignment, err)
    for empty, name in (("--run", "run"), ("--set", "assignments"), ("--warmup", "warmup")):
        status, err = failure(capsys, "plan", path, empty, "")
        assert status == 2 and f"{name} is empty" in err
    assert failure(capsys, "plan", "nowhere")[0] == 2
    (tmp_path / "torn.toml").write_text("[run\n")
    assert failure(capsys, "plan", str(tmp_path / "torn.toml"))[0] == 2


def test_a_gpu_that_is_not_there_is_status_2(tmp_path, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    path = profile_file(tmp_path)
    status, err = failure(
        capsys,
        *("train", path, "--run", str(tmp_path / "run"), "--set", "capture.mode=graph"),
        *("capture.warmup_rounds=3", "capture.verify_rounds=3"),
        *("placement.targets=['cuda:0']", "placement.drafters=['cuda:0']"),
    )
    assert status == 2 and "this machine has 0 CUDA devices" in err


def test_data_errors_are_status_3(tmp_path, capsys):
    path = profile_file(tmp_path)
    status, err = failure(capsys, "plan", path, "--set", f"data.shards={tmp_path / 'gone'}")
    assert status == 3 and "gone" in err
    status, err = failure(capsys, "plan", path, "--set", "buckets.max_context=16")
    assert status == 3 and "--max-context 16" in err
    status, err = failure(capsys, "plan", profile_file(tmp_path, rows=[(9, [3])]))
    assert status == 3 and "valid anchor" in err


def test_a_target_that_is_no_configuration_is_one_sentence(tmp_path, capsys):
    path = profile_file(tmp_path)
    texts = {"{": 2, "{}": 2, '{"model_type": "no-such"}': 2, '{"model_type": "gpt2"}': 4, "[1]": 2}
    for text, expected in texts.items():
        (tmp_path / "bad.json").write_text(text)
        status, err = failure(capsys, "plan", path, "--set", f"target.model=random:{tmp_path / 'bad.json'}")
        assert status == expected and err.startswith("error:"), text


def test_more_memory_than_there_is_is_one_sentence(tmp_path, capsys):
    path = profile_file(tmp_path)
    run = str(tmp_path / "run")
    status, err = failure(capsys, "train", path, "--run", run, "--set", "drafter.heads=100000000")
    assert status == 4 and "ran out of memory" in err


def test_a_folder_where_a_file_belongs_is_one_sentence(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
    status, err = failure(
        capsys, "regenerate", str(tmp_path / "p.jsonl"), "--target", write_target(tmp_path), "--out", str(tmp_path)
    )
    assert status in (2, 5) and "error:" in err


def test_a_run_folder_that_cannot_be_made_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for command in ("train", "warmup"):
        status, err = failure(capsys, command, profile_file(tmp_path), "--run", str(tmp_path / "file" / "run"))
        assert status == 5 and "cannot write the run folder" in err


def test_eval_and_export_refuse_what_is_not_a_drafter(tmp_path, capsys):
    status, err = failure(capsys, "eval", str(tmp_path))
    assert status == 2 and "neither a run folder" in err
    status, err = failure(capsys, "export", str(tmp_path), "--out", str(tmp_path / "out"))
    assert status == 2


def chat_target(folder: Path) -> str:
    """A folder that `prepare` takes as a target: a configuration and a tokenizer."""
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(tokenizer)}))
    return str(folder)


def test_prepare_shows_rows_and_writes_only_where_it_is_told_to(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "hi", "completion": "yes sir", "text": "hello" * 4}))
    command = ["prepare", str(rows), "--target", chat_target(tmp_path / "target"), "--json"]
    assert failure(capsys, *command)[0] == 2
    before = sorted(tmp_path.rglob("*"))
    assert main([*command, "--show", "1"]) == 0
    out, err = capsys.readouterr()
    assert "\u27e6yes sir<|end|>\u27e7" in err
    assert json.loads(out.splitlines()[-1])["rows_used"] == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert main([*command, "--show", "1", "--format", "text", "--out", str(tmp_path / "shards")]) == 0
    out, err = capsys.readouterr()
    assert "\u27e6hellohello" in err
    summary = json.loads(out.splitlines()[-1])
    assert set(summary) >= {"rows_read", "rows_used", "rows_skipped", "tokens", "supervised_tokens", "shards"}
    assert summary["tokens"] == summary["supervised_tokens"] == 20


def test_prepare_shows_the_rows_that_a_run_names(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "hi", "completion": f"yes {name}"}) + "\n" for name in "abc"))
    target = ["--target", chat_target(tmp_path / "target"), "--block-size", "2", "--json"]
    shards = str(tmp_path / "shards")
    assert main(["prepare", str(rows), *target, "--out", shards]) == 0
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert main(["prepare", shards, *target, "--show-rows", "2,0"]) == 0
    out, err = capsys.readouterr()
    assert re.findall(r"row \d|yes \w", err) == ["row 2", "yes c", "row 0", "yes a"]
    assert "\u27e6yes c<|end|>\u27e7" in err
    assert json.loads(out.splitlines()[-1])["rows"] == [2, 0]
    assert sorted(tmp_path.rglob("*")) == before
    assert "has rows 0 to 2, found --show-rows 3" in failure(capsys, "prepare", shards, *target, "--show-rows", "3")[1]
    with pytest.raises(SystemExit):
        main(["prepare", shards, *target, "--show-rows", "x"])
    assert "such as 17,24, found x" in capsys.readouterr().err
    assert "one shard folder" in failure(capsys, "prepare", shards, "b", *target, "--show-rows", "1")[1]


def test_bad_rows_beyond_the_limit_are_status_3_with_the_report(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "hello, hello, hello"}\n{"messages": []}\n')
    command = ["prepare", str(rows), "--target", chat_target(tmp_path / "target"), "--out", str(tmp_path / "shards")]
    for limit, message in ((["--max-bad-rows", "0.4"], "50.0% of the rows are bad"), (["--strict"], "--strict is on")):
        status, err = failure(capsys, *command, *limit)
        assert status == 3 and message in err and "skipped: 1 empty row" in err
    assert not (tmp_path / "shards").exists()
    assert main([*command, "--max-bad-rows", "0.5"]) == 0


def test_a_run_exports_and_the_export_reads_back(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", profile_file(tmp_path), "--run", str(run)]) == 0
    assert main(["export", str(run), "--out", str(tmp_path / "drafter"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "the drafter of step 6" in err
    summary = json.loads(out.splitlines()[-1])
    assert summary["format"] == "zlab" and summary["tensors"] == 3 + 11 * 2
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 4
    card = (tmp_path / "drafter" / "README.md").read_text()
    digest = hashlib.sha256((run / "receipt.json").read_bytes()).hexdigest()
    assert "| steps | 6 |" in card and digest in card and "| data | 24 rows, " in card
    (run / "eval-questions.json").write_text(
        json.dumps(
            {"step": 6, "temperature": 0.0, "sets": [{"name": "a/questions.jsonl", "prompts": 3, "acceptance": 2.5}]}
        )
    )
    (run / "eval-of-an-earlier-step.json").write_text(json.dumps({"step": 3}))
    arguments = ["export", str(run), "--format", "speculators", "--out", str(tmp_path / "other"), "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["format"] == "speculators"
    assert "| acceptance length, 3 prompts of questions.jsonl | 2.500 |" in (tmp_path / "other/README.md").read_text()
    assert (
        main(["export", str(tmp_path / "drafter"), "--target", write_target(tmp_path), "--out", str(tmp_path / "b")])
        == 0
    )
