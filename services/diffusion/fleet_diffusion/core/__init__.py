"""Pure parts: no clock, I/O, randomness or async."""
