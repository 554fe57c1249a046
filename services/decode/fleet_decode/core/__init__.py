"""Pure parts of the decode service: text, stop strings, sampling, continuation."""
