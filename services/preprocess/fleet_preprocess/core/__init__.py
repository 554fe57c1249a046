"""Pure decisions and transformations of preprocess: bytes and values in, values out."""
