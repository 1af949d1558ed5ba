"""memlab in a notebook: thin magics over the Python API.

- `magic`: what `%load_ext memlab` registers; `cell_magic`: `%%memfit`; `line_magic`: `%memfit`
- `notebook`: what the magics of one shell share
- `parser`: the flags of the magics, those of plans from the plan's fields; `help`: what the magics say about them
- `completion`: what Tab completes on their lines
- `cells`: running a cell's text untouched, from inside a cell magic
- `background`: a cell on a thread of its own
- `panel`: the widgets of a run, of `controls`, `figure_widget` and `status`; `panels`: those that are open
- `comms`: clicks reach the kernel while a cell runs; `main_thread`: what must not meet a cell is done when none runs
- `freeing`: what a failed cell held is let go
- `watch`: plan, session and meter for the duration of one cell
- `prediction`: what is predicted, chosen for a budget and found; `predicted_plans`: what `%memfit predict` returns
- `history`: what was measured, per model, across cells
- `live`: the line that shows progress; `display`: receipts in every format a front end may want
- `config`: what `%config MemLab` holds

Nothing here is imported by `import memlab`.
"""
