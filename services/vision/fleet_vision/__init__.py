"""The vision service."""
