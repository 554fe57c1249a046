"""The audio service."""
