"""A live run as people steer it: what is asked of it, and what has become of that. What a view draws is a `memlab.records.live_state.Moment`.

- `source`: what a view can see and ask, of a live run as of a recorded one
- `control`: the live run, of `live_model` (the model, and the steps it can run by itself), `live_loop` (what goes on with it),
  `live_steps` (measuring, holding and running steps), `steering` and `pending_changes` (which settings were asked for, and what
  becomes of them), `feed` (what was measured) and `live_predictions` (what plans would give; `effects`: single settings)
- `replaying`: the recorded run
- `views`: who is drawn, and how often
- `stage`: where steps are made, and how a loop is held

Nothing here draws, and nothing here knows IPython or a widget.
"""
