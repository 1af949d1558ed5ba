"""Sessions: a plan applied to a live workload, switched at step boundaries and undone exactly.

`session` holds what users and panels talk to, `model_calls` and `stepping` what is done at the two hooks, `switching`
when the plan changes, `in_force` the change from one plan to the next, `rollback` what a change that fails puts back,
`snapshot` copies of all that training changes, `tape` a step of the loop that is written down (`recording`) and run again
(`replay`), `together` what several models need, `nested` what becomes of a session whose model is wrapped.
"""

from __future__ import annotations

from memlab.session.session import Session, fit
from memlab.session.switching import check
from memlab.session.together import require_compatible, session_of, sessions, switch_together, train_together

__all__ = [
    "Session",
    "check",
    "fit",
    "require_compatible",
    "session_of",
    "sessions",
    "switch_together",
    "train_together",
]
