"""Models, data and profiles come from elsewhere: none of them can run code or write beside the run folder."""

import ast
import json
import runpy
from pathlib import Path

import pytest
from rich.console import Console
from tiny import tiny_profile

from draftgraph.engine.errors import UsageError
from draftgraph.engine.models.target import load_config, load_model, load_tokenizer
from draftgraph.engine.train import train

ROOT = Path(__file__).parents[1]
FILES = sorted(path for room in ("engine", "kernels", "capture") for path in (ROOT / room).rglob("*.py"))
# The data process, and the workers of `prepare`, unpickle what their own parent sends through a pipe, and it theirs.
PIPE = {"engine/data/loader.py": {"pickle.load"}, "engine/data/workers.py": {"pickle.loads"}}
RUNS_CODE = {"pickle.load", "pickle.loads", "torch.load", "eval", "exec", "compile", "os.system", "os.popen"}


def called(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def keywords(tree: ast.AST) -> set[tuple[str, str]]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    return {(node.arg or "", ast.unparse(node.value)) for node in nodes}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unpickles_evaluates_or_trusts(path):
    tree = ast.parse(path.read_text())
    assert called(tree) & RUNS_CODE <= PIPE.get(str(path.relative_to(ROOT)), set())
    for name in ("shell", "allow_pickle", "trust_remote_code"):
        assert (name, "True") not in keywords(tree)


def test_every_model_is_read_without_its_own_code():
    tree = ast.parse((ROOT / "engine/models/target.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    readers = [node for node in calls if ast.unparse(node.func).endswith(".from_pretrained")]
    assert len(readers) == 3
    assert all(("trust_remote_code", "False") in keywords(node) for node in readers)


def test_a_models_own_code_is_never_run(tmp_path):
    """A folder that asks for its own classes is refused at once: no question is asked, nothing is imported."""
    proof = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(proof)!r}, 'w')\nclass Own: pass\n")
    auto = {name: "own.Own" for name in ("AutoConfig", "AutoModelForCausalLM")} | {"AutoTokenizer": ["own.Own", None]}
    config = {"model_type": "its-own", "auto_map": auto}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Own"}))
    import torch

    for read in (load_config, load_tokenizer, lambda name: load_model(name, torch.float32, torch.device("cpu"))):
        with pytest.raises(UsageError, match=r"target\.model"):
            read(str(tmp_path))
    assert not proof.exists()


def test_a_run_writes_into_its_folder_alone(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    profile = tiny_profile(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    train(profile, tmp_path / "run", False, Console(quiet=True))
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    changed = {path for path, time in after.items() if before.get(path) != time} - {tmp_path}
    assert changed and all(path == tmp_path / "run" or tmp_path / "run" in path.parents for path in changed)


def test_secrets_of_the_environment_reach_no_file_and_no_line_of_a_run(tmp_path, monkeypatch, capfd):
    secret = "secret-0123456789abcdef"
    for name in ("WANDB_API_KEY", "OPENAI_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, secret)
    train(tiny_profile(tmp_path, log={"every": 1}), tmp_path / "run", False, Console(stderr=True, width=200))
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if secret.encode() in path.read_bytes()]
    assert secret not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("answer", "good", "line"),
    [
        ("", True, "skipped: it cannot reach its source"),
        ('{"dependencies": [{"name": "a", "skip_reason": "not found"}]}', True, "knows none of the packages"),
        (
            '{"dependencies": [{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "x"}]}',
            True,
            "1 of 2",
        ),
        (
            '{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}, {"id": "CVE-2"}]}]}',
            False,
            "known vulnerabilities: a 1: CVE-1, CVE-2",
        ),
    ],
)
def test_a_known_vulnerability_fails_the_check_and_an_unreachable_source_is_a_line(answer, good, line):
    found = runpy.run_path(str(ROOT / ".ci" / "audit.py"))["verdict"](answer)
    assert found[0] is good and line in found[1]
