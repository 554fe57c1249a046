"""The vision tower and projector that we train, in the layout and with the names of LLaVA."""

from typing import Any

IMAGE_SIDE_PX = 224
PATCH_SIDE_PX = 32
NUM_IMAGE_TOKENS = (IMAGE_SIDE_PX // PATCH_SIDE_PX) ** 2
TEXT_HIDDEN_SIZE = 576
PIXEL_MEAN = (0.5, 0.5, 0.5)
PIXEL_STD = (0.5, 0.5, 0.5)
# -1 with "default" is the last layer without its class token: one feature per patch.
VISION_FEATURE_LAYER = -1
VISION_FEATURE_STRATEGY = "default"
WEIGHTS_NAME = "vision.safetensors"
TOWER_PREFIX = "model.vision_tower."
PROJECTOR_PREFIX = "model.multi_modal_projector."
VISION_CONFIG: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "image_size": IMAGE_SIDE_PX,
    "patch_size": PATCH_SIDE_PX,
    "projection_dim": 192,
    "hidden_act": "relu",
}


def build_tower() -> Any:
    """A CLIP vision model with fresh weights; call torch.manual_seed first."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    values = {key: value for key, value in VISION_CONFIG.items() if key != "model_type"}
    return CLIPVisionModel(CLIPVisionConfig(**values))


def build_projector() -> Any:
    """LLaVA's two-layer projector from the tower into the language model's embedding space."""
    from transformers import LlamaConfig, LlavaConfig
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

    config = LlavaConfig(
        vision_config=dict(VISION_CONFIG),
        text_config=LlamaConfig(hidden_size=TEXT_HIDDEN_SIZE),
        vision_feature_layer=VISION_FEATURE_LAYER,
        vision_feature_select_strategy=VISION_FEATURE_STRATEGY,
    )
    return LlavaMultiModalProjector(config)


def normalise(pixels: Any, dtype: Any) -> Any:
    """Turn uint8 pixels of any shape into numbers for the tower; every channel has the same mean and deviation."""
    return pixels.to(dtype).mul_(1 / (255 * PIXEL_STD[0])).sub_(PIXEL_MEAN[0] / PIXEL_STD[0])


def split_patches(pixels: Any) -> Any:
    """[num, 3, side, side] -> [num, patches, 3 * patch * patch], in the order of the patch embedding's weights."""
    num, grid = pixels.shape[0], IMAGE_SIDE_PX // PATCH_SIDE_PX
    cells = pixels.reshape(num, 3, grid, PATCH_SIDE_PX, grid, PATCH_SIDE_PX)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(num, grid * grid, 3 * PATCH_SIDE_PX**2)


def layer_states(tower: Any, patches: Any) -> list[Any]:
    """What the tower computes from split patches, layer by layer; states [num, 1 + patches, hidden], the input first.

    For training: the same numbers as the tower's own forward, whose convolution is slow to differentiate on CPUs.
    """
    import torch
    import torch.nn.functional as F

    model = getattr(tower, "vision_model", tower)
    table = model.embeddings
    states = F.linear(patches, table.patch_embedding.weight.flatten(1))
    states = torch.cat([table.class_embedding.to(states.dtype).expand(len(states), 1, -1), states], dim=1)
    found = [model.pre_layrnorm(states + table.position_embedding.weight)]
    for layer in model.encoder.layers:
        states = layer(found[-1], attention_mask=None)
        found.append(states[0] if isinstance(states, tuple) else states)
    return found


def start_patch_embedding(tower: Any) -> None:
    """Start from low frequencies of each colour, evenly strong, instead of noise over thousands of pixels."""
    import torch

    side = PATCH_SIDE_PX
    steps = (torch.arange(side) + 0.5) * torch.pi / side
    waves = [torch.cos(k * steps) / (side / (2 if k else 1)) ** 0.5 for k in range(side)]
    pairs = sorted(((i, j) for i in range(side) for j in range(side)), key=lambda p: (p[0] ** 2 + p[1] ** 2, p))
    weight = getattr(tower, "vision_model", tower).embeddings.patch_embedding.weight
    with torch.no_grad():
        weight.zero_()
        for row in range(weight.shape[0]):
            i, j = pairs[row // 3]
            # The mean over a patch is as strong as `side`; higher frequencies of edges fall off like 1 / frequency.
            strength = (1 + (i * i + j * j) ** 0.5) / side
            weight[row, row % 3] = strength * torch.outer(waves[i], waves[j])
