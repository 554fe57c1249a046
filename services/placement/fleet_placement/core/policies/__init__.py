"""Placement policies by name."""

from __future__ import annotations

from fleet_placement.core.policies.least_loaded import LeastLoadedPolicy
from fleet_placement.core.policies.port import Policy
from fleet_placement.core.policies.static import StaticPolicy

#: Everything `FLEET_PLACEMENT_POLICY` may name.
POLICIES: dict[str, Policy] = {policy.name: policy for policy in (StaticPolicy(), LeastLoadedPolicy())}
