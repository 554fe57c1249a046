"""Diffusion: prompts in, pictures out, one denoising step at a time."""
