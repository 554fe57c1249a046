"""Decisions without I/O: where text may be cut, samples as bytes."""
