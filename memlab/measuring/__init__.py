"""Live numbers: memory and speed of the real training loop."""
