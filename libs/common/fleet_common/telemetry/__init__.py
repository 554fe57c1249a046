"""Metrics, spans and the health endpoint of every process."""
