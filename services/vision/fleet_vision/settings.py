"""Settings of the vision service (`FLEET_VISION_*`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from fleet_common.settings import WorkerSettings, stage_prefix
from fleet_contracts.base import Stage


class VisionSettings(WorkerSettings):
    """What a vision worker is told. `engine_args`: see `engine/real.py` and `engine/scripted.py`."""

    model_config = SettingsConfigDict(env_prefix=stage_prefix(Stage.VISION_ENCODE))

    threads: int = Field(1, description="Compute threads of torch.", ge=1)
    max_batch: int = Field(8, description="Images per pass through the tower, and steps per engine call.", ge=1)
    max_pack_patches: int = Field(
        16384, description="Patches per packed pass; 0: any. A larger image goes alone.", ge=0
    )
    align: int = Field(1, description="Fill packed passes up to a multiple of so many patches; 1: never.", ge=1)
    cache_bytes: int = Field(256 << 20, description="Features kept for images seen again; 0: none.", ge=0)
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Number format of features in the store.")
