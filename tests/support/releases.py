"""Former releases as they were: unpacked beside the checkout, and first on the path of a process."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ROOT / "tests" / "releases"

#: The release that today's code must work beside.
FORMER = "0.1.0"


@dataclass(frozen=True, slots=True)
class Release:
    """Sources of a release in a folder of their own."""

    name: str
    folder: Path

    @property
    def python_path(self) -> str:
        """Before the checkout's own folders, which an editable install puts last."""
        parts = (self.folder, self.folder / "contracts", self.folder / "libs" / "common")
        return ":".join(str(part) for part in (*parts, *sorted((self.folder / "services").iterdir())))


def unpack(folder: Path, name: str = FORMER) -> Release:
    """Unpack a release into an empty folder."""
    with tarfile.open(RELEASES / f"omnifleet-{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    # What `importlib.metadata` reads the release from.
    metadata = folder / f"omnifleet-{name}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: omnifleet\nVersion: {name}\n")
    return Release(name, folder)
