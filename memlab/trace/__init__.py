"""A training step on a fake twin of the live objects: what it would allocate, and what it would compute."""
