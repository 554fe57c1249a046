"""HTTP: one module per route, and one (`errors`) that turns every failure into OpenAI's envelope."""
