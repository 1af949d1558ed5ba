"""The figures memlab is held to, as ratios measured in one run: ``python -m tests.bench``."""
