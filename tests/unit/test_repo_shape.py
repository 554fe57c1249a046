"""The services look alike, the documents tell the truth, and nothing private or machine-made is committed."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if path.is_dir())
STANDARD = ("__init__.py", "__main__.py", "settings.py", "app.py", "core/__init__.py", "py.typed")
OF_WORKERS = ("worker.py", "engine/__init__.py", "engine/port.py", "engine/scripted.py")
MAX_MODULE_LINES = 500


def tracked(pattern: str = "") -> list[Path]:
    """Files git tracks, relative to the root."""
    listed = subprocess.run(["git", "ls-files", pattern or "."], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_the_standard_files(service: str) -> None:
    package = ROOT / "services" / service / f"fleet_{service}"
    wanted = STANDARD if service in {"ingress", "placement"} else STANDARD + OF_WORKERS

    missing = [name for name in wanted if not (package / name).exists()]
    missing += [name for name in ("README.md", "tests") if not (package.parent / name).exists()]

    assert missing == []


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_wired_everywhere(service: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tool, package = project["tool"], f"fleet_{service}"

    assert service in project["project"]["optional-dependencies"]
    assert f"services/{service}/{package}" in tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert f"services/{service}" in tool["hatch"]["build"]["dev-mode-dirs"]
    assert package in tool["mypy"]["packages"]
    assert package in tool["importlinter"]["root_packages"]
    assert (ROOT / "requirements" / f"{service}.txt").exists()
    assert f"\n  {service}:\n" in (ROOT / "deploy" / "compose.yaml").read_text()


def symbols_in(document: str) -> list[str]:
    """Every `path.py:Name` and `path.py:Class.method` a document names."""
    return re.findall(r"`([\w/]+\.py:[\w.]+)`", (ROOT / document).read_text())


@pytest.mark.parametrize("symbol", symbols_in("ARCHITECTURE.md"))
def test_a_symbol_named_in_the_architecture_exists(symbol: str) -> None:
    path, _, dotted = symbol.partition(":")
    scope: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body

    for name in dotted.split("."):
        named = [
            node
            for node in scope
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        assert named, f"{symbol}: no {name}"
        scope = named[0].body


def test_the_architecture_names_symbols_at_all() -> None:
    assert len(symbols_in("ARCHITECTURE.md")) >= 12


def test_no_module_outgrows_a_reader() -> None:
    long = {
        str(path): count
        for path in tracked("*.py")
        if (count := (ROOT / path).read_text().count("\n")) > MAX_MODULE_LINES
    }

    assert long == {}


def test_no_host_of_a_registry_and_no_machine_path_is_committed() -> None:
    hosts = [
        "pypi" + r"\.org",
        "python" + "hosted",
        "registry" + r"\.npm",
        "deb" + r"\.debian",
        "/" + "work/",
        "/tmp/" + "bash_jobs",
    ]
    pattern = re.compile("|".join(hosts))

    leaks = []
    for path in tracked():
        full = ROOT / path
        if (
            full.is_file()
            and full.stat().st_size < 2_000_000
            and full.suffix not in {".safetensors", ".msgpack", ".png"}
        ):
            leaks += [str(path) for line in full.read_text(errors="replace").splitlines() if pattern.search(line)]

    assert leaks == []


def test_no_large_binary_is_committed() -> None:
    large = [str(path) for path in tracked() if (ROOT / path).stat().st_size > 25 * 1024 * 1024]

    assert large == []
