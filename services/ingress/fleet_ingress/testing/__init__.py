"""For tests: an ingress on a memory bus, and scripted workers that speak the protocol of the real ones.

ATTENTION: do not use in production. The workers do in a few lines what the stage runner does; faults are scripted.
"""

from __future__ import annotations

from fleet_ingress.testing.rig import IngressRig, eventually, open_rig
from fleet_ingress.testing.script import FaultError, Script
from fleet_ingress.testing.workers import (
    EMBEDDING_MODEL,
    IMAGE_MODEL,
    LISTENING_MODEL,
    SPEECH_MODEL,
    TEXT_MODEL,
    VOICE_MODEL,
    ScriptedFleet,
)

__all__ = [
    "EMBEDDING_MODEL",
    "IMAGE_MODEL",
    "LISTENING_MODEL",
    "SPEECH_MODEL",
    "TEXT_MODEL",
    "VOICE_MODEL",
    "FaultError",
    "IngressRig",
    "Script",
    "ScriptedFleet",
    "eventually",
    "open_rig",
]
