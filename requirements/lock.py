"""Write or check the hash-locked requirements of every image: `python requirements/lock.py [--check]`.

Versions and hashes only: no index URL and no host name ever enters a lock. `--check` works offline: each lock records
the digest of what it was made from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "requirements"
#: `dev` first: the others are constrained by it, so that one environment can hold any of them.
IMAGES = ("dev", "local", "ingress", "preprocess", "vision", "decode", "audio", "diffusion", "placement")
OVERRIDES = HERE / "outside-the-lock.in"


def inputs_digest() -> str:
    """Digest of everything a lock depends on: dependency tables and overrides."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tables = {
        "requires-python": project["requires-python"],
        "dependencies": project["dependencies"],
        "extras": project["optional-dependencies"],
        "overrides": OVERRIDES.read_text(),
    }
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


def compile_lock(image: str) -> str:
    """Resolve one image's extra; versions already locked are kept unless they no longer fit."""
    target = HERE / f"{image}.txt"
    constraint = [] if image == "dev" else ["--constraint", str(HERE / "dev.txt")]
    flags = ["--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--no-header", "--no-annotate"]
    command = ["uv", "pip", "compile", "pyproject.toml", "--extra", image, "--python-version", "3.11", "--quiet"]
    command += ["--override", str(OVERRIDES), *constraint, *flags, "--output-file", str(target)]
    uv = Path(sys.executable).parent / "uv"
    subprocess.run([str(uv), *command[1:]], cwd=ROOT, check=True)
    body = "".join(line for line in target.read_text().splitlines(keepends=True) if not line.startswith("#"))
    return f"# Made by `make lock`; torch is installed beside it. inputs: sha256:{inputs_digest()}\n{body}"


def problems(image: str) -> list[str]:
    """What is wrong with a committed lock."""
    target = HERE / f"{image}.txt"
    if not target.exists():
        return [f"{target.name} is missing"]
    text = target.read_text()
    found = []
    if f"sha256:{inputs_digest()}\n" not in text:
        found.append(f"{target.name} is older than pyproject.toml: run `make lock`")
    if re.search(r"https?://|--(extra-)?index-url|--find-links", text):
        found.append(f"{target.name} names an index or a URL")
    return found


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a lock is stale")
    if parser.parse_args().check:
        found = [problem for image in IMAGES for problem in problems(image)]
        print("\n".join(found) or "locks are current")
        return 1 if found else 0
    for image in IMAGES:
        (HERE / f"{image}.txt").write_text(compile_lock(image))
        print(f"wrote requirements/{image}.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
