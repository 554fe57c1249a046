"""Durable jobs: files, batches and single long requests that outlive every service."""
