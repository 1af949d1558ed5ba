"""Calls that only run forward: gradients off, weights in half precision, memory and speed of each call, the KV cache."""
