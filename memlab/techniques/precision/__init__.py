"""Number formats of a training step: `precision` is the technique, `moments` splits fp32 numbers, `own_form` saves them whole."""
