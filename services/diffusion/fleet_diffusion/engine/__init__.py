"""The model behind a port: real (diffusers) or scripted."""
