"""Tenants as part of the names of what is theirs. Pure."""

from __future__ import annotations

import hashlib


def owner_token(tenant: str) -> str:
    """A tenant as one token of a key: its name may hold anything."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:24]
