"""Traces of PyTorch's CUDA allocator, recorded on a GPU to be replayed without one."""
