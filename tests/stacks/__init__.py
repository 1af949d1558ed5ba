"""Loops of well-known libraries and of well-known kinds under every setting, held against the untouched run.

``python -m tests.stacks`` runs all of it and writes ``docs/stacks.md``.
"""
