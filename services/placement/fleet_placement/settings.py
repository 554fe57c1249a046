"""Settings of placement: environment variables `FLEET_PLACEMENT_*`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from fleet_common.settings import ServiceSettings


class PlacementSettings(ServiceSettings):
    """How tables are made and who may make them."""

    model_config = SettingsConfigDict(env_prefix="FLEET_PLACEMENT_", frozen=True, extra="forbid")

    instance_id: str = Field("", description="Name of this process; empty: placement- and random characters.")
    policy: str = Field("least_loaded", description="`least_loaded` or `static`.")
    interval_s: float = Field(5.0, description="Between two tables that differ only in measured load.", gt=0)
    leader_lease_s: int = Field(4, description="Leader lease in whole seconds; renewed three times in that span.", ge=1)
    telemetry_stale_s: float = Field(3.0, description="Age of a worker's last report at which its share shrinks.")
    telemetry_silent_s: float = Field(4.0, description="Age at which its share is zero.")
    share_change_ratio: float = Field(0.03, description="Shares that moved less are not worth a table.", ge=0, le=1)
    grace_s: float = Field(8.0, description="After an outage of the broker, how long nobody is taken for dead.")
    forget_s: float = Field(600.0, description="How long an empty pool without any worker stays known.")
    sweep_s: float = Field(2.0, description="Between two looks at what waits in the broker.", gt=0)
    move_batch: int = Field(64, description="Items the mover takes from one queue at a time.", ge=1)
