"""Engines of preprocess: the model's tokenizer, chat template and image settings, or a scripted stand-in."""
