"""torch's CUDA build on an emulated GPU: `python -m tests.emulated_gpu --gpu T4 -- pytest tests/gpu`; see README.md."""
