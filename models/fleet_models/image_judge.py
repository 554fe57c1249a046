"""What a generated picture shows, found by geometry and colour distance alone: no model looks at it."""

from dataclasses import dataclass
from typing import Any

from fleet_models.colours import ANCHORS
from fleet_models.one_shape import OneShape, ShapeDrawing, draw_one_shape
from fleet_models.scenes import SHAPES

MIN_OVERLAP = 0.75
_BORDER_PX = 2
_SIDE_PX = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was seen, and how well the best template covers it (intersection over union, 0 to 1)."""

    seen: OneShape
    overlap: float

    def agrees_with(self, wanted: OneShape) -> bool:
        """Tell whether shape, colour and background are the wanted ones and the shape is a clear one."""
        return self.seen == wanted and self.overlap >= MIN_OVERLAP


def judge(pixels: Any) -> Verdict:
    """Name shape, colour and background of an RGB picture, uint8 [height, width, 3].

    The background is the median of the border; the shape is whatever is nearer to the other colour. Templates of the
    five shapes are laid over the box of the shape at several proportions.
    """
    import numpy as np

    pixels = _at_side(pixels).astype(np.float64)
    border = np.ones(pixels.shape[:2], bool)
    border[_BORDER_PX:-_BORDER_PX, _BORDER_PX:-_BORDER_PX] = False
    background = np.median(pixels[border], axis=0)
    away = np.linalg.norm(pixels - background, axis=-1)
    inside = away > 0.7 * np.percentile(away, 97)
    if not inside.any():
        name = nearest_colour(background)
        return Verdict(OneShape("", name, name), 0.0)
    colour = np.median(pixels[inside], axis=0)
    axis = colour - background
    mask = (pixels - background) @ axis > 0.5 * axis @ axis
    overlaps = {shape: _best_overlap(mask, shape) for shape in SHAPES}
    shape = max(overlaps, key=lambda name: overlaps[name])
    return Verdict(OneShape(shape, nearest_colour(colour), nearest_colour(background)), overlaps[shape])


def nearest_colour(rgb: Any) -> str:
    """The name whose known values come nearest in CIELAB; `rgb` holds three levels from 0 to 255."""
    import numpy as np

    distances = {
        name: float(np.linalg.norm(_lab(np.array(anchors, float)) - _lab(np.asarray(rgb, float)), axis=-1).min())
        for name, anchors in ANCHORS.items()
    }
    return min(distances, key=lambda name: distances[name])


def _best_overlap(mask: Any, shape: str) -> float:
    """The highest intersection over union of a mask and templates that are as large and stand where it does."""
    import numpy as np

    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return 0.0
    box = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    extent = max(box[1] - box[0], box[3] - box[2])
    best = 0.0
    for template in _templates(shape):
        for size in (extent - 1, extent, extent + 1, extent + 2):
            placed = _place(template, size, ((box[0] + box[1]) / 2, (box[2] + box[3]) / 2))
            union = (placed | mask).sum()
            best = max(best, float((placed & mask).sum() / union))
    return best


def _templates(shape: str) -> list[Any]:
    """Masks of one shape at several proportions, each cropped to its own box; large, to be scaled down."""
    import numpy as np

    cropped = []
    for inner_ratio, arm_ratio in ((0.38, 0.26), (0.42, 0.31), (0.46, 0.36)):
        how = ShapeDrawing(256, (255, 255, 255), (0, 0, 0), (0.5, 0.5), 0.9, 0.0, inner_ratio, arm_ratio, 1)
        mask = np.asarray(draw_one_shape(OneShape(shape, "white", "black"), how).convert("L")) > 127
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        cropped.append(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
        if shape not in {"star", "cross"}:
            break
    return cropped


def _place(template: Any, size_px: int, centre: tuple[float, float]) -> Any:
    """Scale a template so that its longer side is `size_px`, and put it on an empty picture."""
    import numpy as np

    scale = max(template.shape) / max(1, size_px)
    rows = ((np.arange(_SIDE_PX) + 0.5 - centre[0]) * scale + template.shape[0] / 2).astype(int)
    columns = ((np.arange(_SIDE_PX) + 0.5 - centre[1]) * scale + template.shape[1] / 2).astype(int)
    row_in = ((np.arange(_SIDE_PX) + 0.5 - centre[0]) * scale + template.shape[0] / 2 >= 0) & (rows < template.shape[0])
    column_in = ((np.arange(_SIDE_PX) + 0.5 - centre[1]) * scale + template.shape[1] / 2 >= 0) & (
        columns < template.shape[1]
    )
    placed = template[np.clip(rows, 0, template.shape[0] - 1)][:, np.clip(columns, 0, template.shape[1] - 1)]
    return placed & row_in[:, None] & column_in[None]


def _at_side(pixels: Any) -> Any:
    import numpy as np
    from PIL import Image

    if pixels.shape[:2] == (_SIDE_PX, _SIDE_PX):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((_SIDE_PX, _SIDE_PX), Image.Resampling.BOX))


def _lab(rgb: Any) -> Any:
    """CIELAB (D65) of sRGB levels 0 to 255; the last axis holds the three of them."""
    import numpy as np

    linear = np.where(rgb <= 10.31475, rgb / 255 / 12.92, ((rgb / 255 + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = linear @ to_xyz.T / np.array([0.95047, 1.0, 1.08883])
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], axis=-1)
