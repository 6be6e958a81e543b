"""Run profiles: TOML in, plain dictionaries out. The engine gives them types and checks every key."""

import tomllib
from pathlib import Path
from typing import Any

# Found beside this file: importlib.resources fails on a mapped namespace under an editable install.
FOLDER = Path(__file__).resolve().parent
MODELS = FOLDER / "models"  # shapes for random targets
PEERS = FOLDER / "peers"  # the recorded row lengths
WARMUP_SCHEMA = FOLDER / "warmup.schema.json"  # of what warm-up finds
DATA = FOLDER / "data"  # the demo's conversations


class ProfileNotFound(Exception):
    """No such file and no shipped profile of that name."""


def shipped() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_profile(name: str) -> dict[str, Any]:
    """Read a profile by path or by shipped name.

    Raises:
        ProfileNotFound: with the names that exist.
        tomllib.TOMLDecodeError: the file is not TOML.
    """
    path = Path(name)
    if not path.is_file():
        path = FOLDER / f"{name.removesuffix('.toml')}.toml"
    if not path.is_file():
        raise ProfileNotFound(f"no profile {name!r}; give a path to a TOML file or one of: {', '.join(shipped())}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def set_key(values: dict[str, Any], assignment: str) -> None:
    """Apply one `section.key=value`; the value is read as TOML, and as a bare string where it is not TOML.

    `section.key.name=value` sets one name of a key that is a table.

    Raises:
        ValueError: the assignment has another form.
    """
    key, equals, text = assignment.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ValueError(f"--set takes section.key=value, found {assignment!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, name = [section, *name.split(".")]
    keys = values
    for table in tables:
        keys = keys.setdefault(table, {})
        if not isinstance(keys, dict):
            raise ValueError(f"the profile has {table} = {keys!r}, expected a section [{table}]")
    keys[name] = value
