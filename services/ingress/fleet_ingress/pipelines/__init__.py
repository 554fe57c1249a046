"""Pipelines: the folder of files, and requests that pass several models."""
