"""Rescue: when memory runs out, the loop goes on under a plan that needs less, and loses nothing."""

from __future__ import annotations
