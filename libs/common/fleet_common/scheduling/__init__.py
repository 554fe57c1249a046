"""Pure decisions of a worker: which step next, with whom, how many to hold, where to send. No clock, I/O or chance."""
