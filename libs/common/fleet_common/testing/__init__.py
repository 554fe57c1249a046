"""Real servers and fixtures for tests; nothing here is imported by a service."""
