"""The shape of the repository: who may import whom, names that must not be importable, sizes, the reader's map."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "capture", "profiles", "engine")
MAY_IMPORT = {"kernels": {"kernels"}, "capture": {"capture"}, "profiles": {"profiles"}, "engine": set(ROOMS)}
# Scripts that run beside the package, to measure or to make its data.
SCRIPTS = ("profiles/peers", "profiles/data")
FILES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


def rooms_of(names: list[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("draftgraph.")}


def is_script(path: Path) -> bool:
    return str(path.relative_to(ROOT)).startswith(SCRIPTS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    for path in FILES:
        if path.relative_to(ROOT).parts[0] == room and not is_script(path):
            assert rooms_of(imports(path)) <= MAY_IMPORT[room], path


def test_data_and_models_know_neither_each_other_nor_the_run():
    for path in FILES:
        part = path.relative_to(ROOT).parts
        if part[:2] == ("engine", "data"):
            forbidden = ("draftgraph.engine.models", "draftgraph.engine.run")
        elif part[:2] == ("engine", "models"):
            forbidden = ("draftgraph.engine.data", "draftgraph.engine.run")
        elif part[:2] == ("engine", "run"):
            forbidden = ("draftgraph.engine.train", "draftgraph.engine.cli", "draftgraph.engine.build")
        else:
            continue
        assert not [name for name in imports(path) if name.startswith(forbidden)], path


def test_the_data_process_starts_without_torch():
    code = "import sys, draftgraph.engine.data.loader; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_room_is_importable_by_its_bare_name():
    for path in [*FILES, *(ROOT / "tests").glob("*.py")]:
        assert not set(ROOMS) & {name.split(".")[0] for name in imports(path)}, path
    assert not list(ROOT.glob("*/__init__.py")) and not list((ROOT / "engine").rglob("__init__.py"))


def test_transformers_imports_a_model_with_the_repository_root_on_the_path():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from transformers import LlamaForCausalLM"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd="/")


def test_files_stay_small():
    long = {str(p): n for p in FILES if not is_script(p) and (n := len(p.read_text().splitlines())) > 350}
    assert not long


def test_every_package_folder_is_installed():
    listed = re.search(r"packages =\n((?:    \S+\n)+)", (ROOT / "setup.cfg").read_text())
    folders = {p.parent for p in FILES if not is_script(p)}
    assert listed is not None
    assert {f"draftgraph.{'.'.join(f.relative_to(ROOT).parts)}" for f in folders} == set(listed[1].split())


def test_the_readme_names_every_file():
    readme = (ROOT / "README.md").read_text()
    assert not [p.name for p in [*FILES, *(ROOT / "profiles").glob("*.toml")] if p.name not in readme]


def test_nothing_compiles_or_traces_in_a_step():
    banned = re.compile(r"torch\.compile|torch\.fx|create_block_mask|flex_attention\(|make_graphed_callables")
    for path in FILES:
        if not is_script(path):
            code = re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.DOTALL)
            assert not banned.search(code), path
