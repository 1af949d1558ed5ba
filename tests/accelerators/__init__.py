"""Backends other than CUDA: a device of our own in the place of hardware."""
