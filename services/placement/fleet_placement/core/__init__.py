"""Pure placement: events in, tables out. No clock, no I/O, no randomness: time is an argument."""
