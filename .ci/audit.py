"""Has an installed package a known vulnerability? Part of `make check`; without a source it says so and passes."""

import json
import subprocess
import sys
from typing import Any


def verdict(answer: str) -> tuple[bool, str]:
    """Whether to go on, and one line, from what `pip-audit --format json` printed."""
    try:
        packages: list[dict[str, Any]] = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return True, "pip-audit skipped: it cannot reach its source"
    audited = [package for package in packages if "skip_reason" not in package]
    if not audited:
        return True, "pip-audit skipped: its source knows none of the packages"
    bad = [f"{p['name']} {p['version']}: {', '.join(v['id'] for v in p['vulns'])}" for p in audited if p["vulns"]]
    if bad:
        return False, f"known vulnerabilities: {'; '.join(bad)}"
    return True, f"pip-audit: {len(audited)} of {len(packages)} packages audited, none with a known vulnerability"


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--skip-editable", "--progress-spinner", "off", "--format", "json"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    except subprocess.TimeoutExpired:
        answer = ""
    good, line = verdict(answer)
    print(line)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
