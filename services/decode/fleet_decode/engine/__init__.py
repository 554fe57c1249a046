"""Token engines: the port, a scripted one, and vLLM."""
