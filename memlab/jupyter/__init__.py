"""memlab in a notebook: thin magics over the Python API.

- `magic`: what `%load_ext memlab` registers; `cell_magic`: `%%memfit`; `line_magic`: `%memfit`
- `notebook`: what the magics of one shell share
- `flags`: flags and words as tables, and what help says of them; `parser`: reading a line by them
- `completion`: what Tab completes on their lines
- `cells`: running a cell's text untouched, from inside a cell magic; `shown_errors`: what is shown of an error
- `background`: a cell on a thread of its own
- `panel`: a run in a page, and the panels that are open; `controls`: what a panel's controls show and ask; `panel_page`: the widget
  (`panel.mjs`, `panel.css`, `figure.mjs`), `saved_view`: what stands there without a kernel or widgets
- `comms`: clicks reach the kernel while a cell runs; `main_thread`: what must not meet a cell is done when none runs
- `freeing`: what a failed cell held is let go
- `watch`: plan, session and meter for the duration of one cell, of `first_call` (which models train), `cell_records` (the models, and
  what is put on record of them) and `cell_meter` (who observes them)
- `prediction`: what is predicted, chosen for a budget and found; `worst`: the largest batch of a loader
- `history`: what was measured, per model, across cells
- `live`: the line that shows progress; `display`: receipts, and what `%memfit predict` returns, in every format a front end may want
- `config`: what `%config MemLab` holds

Nothing here is imported by `import memlab`.
"""
