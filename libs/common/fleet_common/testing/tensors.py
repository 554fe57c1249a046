"""What tests of the tensor store share."""

from __future__ import annotations

from pathlib import Path

from fleet_common.tensors.arena import ArenaConfig, owner_token


def arena_config(
    folder: Path, *, quota_bytes: int = 4 << 20, owner: str = "", grace_s: float = 60.0, boot_id: str = "boot"
) -> ArenaConfig:
    """An arena of the namespace `test`."""
    return ArenaConfig(
        folder=folder,
        namespace="test",
        owner=owner_token(owner),
        boot_id=boot_id,
        quota_bytes=quota_bytes,
        grace_s=grace_s,
    )


def files_in(folder: Path) -> dict[str, int]:
    """Name and size in bytes of every file of a folder."""
    return {path.name: path.stat().st_size for path in folder.iterdir()}
