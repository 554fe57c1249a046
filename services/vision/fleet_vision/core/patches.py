"""Pictures as rows of patches, the form packed towers take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Steps in time, rows and columns of patches.
Grid = tuple[int, int, int]


def to_patches(
    pixels: npt.NDArray[np.float32], patch_px: int, merge: int, time_patch: int
) -> tuple[npt.NDArray[np.float32], Grid]:
    """Cut float32 [3, height, width] into patches, those of one token beside each other.

    Args:
        merge: patches per token and side; the sides are multiples of `patch_px * merge`.
        time_patch: frames per patch: a still picture is repeated.
    Returns:
        float32 [rows * columns, 3 * time_patch * patch_px * patch_px], as Qwen's image processor has it, and the grid.
    Raises:
        ValueError: sides that are no such multiples.
    """
    channels, height, width = pixels.shape
    unit = patch_px * merge
    if height % unit or width % unit:
        raise ValueError(f"{width}x{height} pixels are no whole number of {unit}x{unit} tokens")
    rows, columns = height // patch_px, width // patch_px
    cut = pixels.reshape(channels, rows // merge, merge, patch_px, columns // merge, merge, patch_px)
    cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    repeated = np.broadcast_to(cut, (*cut.shape[:5], time_patch, *cut.shape[6:]))
    return repeated.reshape(rows * columns, channels * time_patch * patch_px * patch_px), (1, rows, columns)
