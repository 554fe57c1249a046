"""Pictures and videos as rows of patches, the form packed towers take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Steps in time, rows and columns of patches.
Grid = tuple[int, int, int]


def to_patches(
    frames: npt.NDArray[np.float32], patch_px: int, merge: int, time_patch: int
) -> tuple[npt.NDArray[np.float32], Grid]:
    """Cut float32 [frames, 3, height, width] into patches, those of one token beside each other.

    Args:
        merge: patches per token and side; the sides are multiples of `patch_px * merge`.
        time_patch: frames per patch: the last one is repeated until they are whole, so a still picture too.
    Returns:
        float32 [steps * rows * columns, 3 * time_patch * patch_px * patch_px], as Qwen's processors have it, and the
        grid.
    Raises:
        ValueError: sides that are no such multiples.
    """
    num_frames, channels, height, width = frames.shape
    unit = patch_px * merge
    if height % unit or width % unit:
        raise ValueError(f"{width}x{height} pixels are no whole number of {unit}x{unit} tokens")
    missing = -num_frames % time_patch
    whole = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)]) if missing else frames
    steps, rows, columns = len(whole) // time_patch, height // patch_px, width // patch_px
    cut = whole.reshape(
        steps, time_patch, channels, rows // merge, merge, patch_px, columns // merge, merge, patch_px
    ).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(steps * rows * columns, channels * time_patch * patch_px * patch_px), (steps, rows, columns)
