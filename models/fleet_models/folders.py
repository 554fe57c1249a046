"""Model folders that appear whole or not at all."""

import contextlib
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MARKER_NAME = "fleet_model.json"


def is_prepared(folder: Path, version: str) -> bool:
    """Tell whether `folder` was completely written by the same version of its recipe."""
    try:
        marker = json.loads((folder / MARKER_NAME).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("version") == version


def packaged_files(package: str) -> Iterator[Path]:
    """The files of an installed package, found without importing it. Raises FileNotFoundError when there is none."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as err:
        raise FileNotFoundError(f"the package {package} is not installed") from err
    paths = (Path(str(file.locate())) for file in files)
    return (path for path in paths if path.is_file())


@contextlib.contextmanager
def write_folder(folder: Path, version: str) -> Iterator[Path]:
    """Yield an empty directory beside `folder`; on success it takes the place of `folder`.

    Two processes may do this at once: one of them wins, and the other's copy is dropped.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    parent = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    fresh = parent / folder.name
    fresh.mkdir()
    try:
        yield fresh
        (fresh / MARKER_NAME).write_text(json.dumps({"name": folder.name, "version": version}) + "\n")
        _replace_folder(fresh, folder, version, parent / "old")
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _replace_folder(fresh: Path, folder: Path, version: str, old: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not is_prepared(folder, version):
            folder.rename(old)
    try:
        fresh.rename(folder)
    except OSError:
        # Somebody else's rename came first; the same version is as good as ours.
        if not is_prepared(folder, version):
            raise
