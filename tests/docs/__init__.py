"""Pages under `docs/` that are written from the code: see `python -m tests.docs --help`."""
