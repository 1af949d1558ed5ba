"""Conversion of a live optimizer: `optimizer` is the technique, `state_formats` translates moments."""
