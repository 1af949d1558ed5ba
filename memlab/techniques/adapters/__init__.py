"""Low-rank adapters on a live model: the technique, the adapters themselves, and where they go."""
