"""The preprocess service."""
