"""A live run as people steer it: what is asked of it, and what has become of that. What a view draws is a `memlab.records.live_state.Moment`.

- `source`: what a view can see and ask, of a live run as of a recorded one
- `control`: the live run, of `pending_changes` (which settings were asked for), `feed` (what was measured), `predicting` (what is
  predicted) and `views` (who is drawn); `rehearsing`: the steps it can run by itself; `stage`: where that is done
- `replaying`: the recorded run
- `effects`: what each setting would change, from predictions
- `thinning`: any number of steps as a bounded number of points
- `pace`: how often a view may be drawn

Nothing here draws, and nothing here knows IPython or a widget.
"""
