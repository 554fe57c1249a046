"""`fleet pipelines`: look at files of pipelines before a fleet does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fleet_cli.errors import CliError
from fleet_ingress.core.pipeline_file import Pipeline, PipelineFault, read_pipeline

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Report:
    """What is to be said of some files, a line each."""

    lines: tuple[str, ...]
    has_faults: bool


def pipelines_folder(wanted: str | None) -> Path | None:
    """The folder the fleet follows: that of the settings, or what comes with the package or lies in the checkout."""
    if wanted is not None:
        return Path(wanted).expanduser().resolve() if wanted else None
    package = Path(__file__).parent
    installed = package / "shipped_pipelines"
    return installed if installed.is_dir() else package.parents[2] / "pipelines"


def check_files(paths: Iterable[Path]) -> Report:
    """Read files, and all in folders. Raises CliError when there is nothing to read."""
    lines: list[str] = []
    has_faults = False
    owners: dict[str, Path] = {}
    for path in (file for given in paths for file in _files(given)):
        try:
            found = _read(path)
            if found.name in owners:
                raise PipelineFault(str(path), found.line, f"`{found.name}` is the pipeline of {owners[found.name]}")
        except PipelineFault as err:
            lines.append(str(err))
            has_faults = True
        else:
            owners[found.name] = path
            lines.append(f"{path}: {found.name} is right; it needs {', '.join(found.models)}")
    return Report(tuple(lines), has_faults)


def list_folder(folder: Path) -> list[str]:
    """One line per file of a folder. Raises CliError when it is none."""
    lines = []
    for path in _files(folder):
        try:
            found = _read(path)
        except PipelineFault as err:
            lines.append(str(err))
        else:
            modalities = f"{', '.join(found.inputs)} -> {', '.join(found.outputs)}"
            lines.append(f"{found.name}\t{modalities}\tneeds {', '.join(found.models)}")
    return lines


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not path.is_file():
        raise CliError(f"{path} is no file and no folder")
    return [path]


def _read(path: Path) -> Pipeline:
    try:
        return read_pipeline(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as err:
        raise PipelineFault(str(path), 1 + err.object.count(b"\n", 0, err.start), "the file is no UTF-8 text") from err
