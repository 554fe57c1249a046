"""Engines of vision: a tower and projector through transformers, or a scripted stand-in."""
