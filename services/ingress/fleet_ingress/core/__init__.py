"""Pure decisions of the ingress: no clock, I/O, logging, randomness or async; time is an argument."""
