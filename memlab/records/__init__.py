"""Records: what was measured, predicted or done, as plain values without torch or display code.

Stages hand records to each other; `memlab.report` draws them. `measurement` and `prediction` are exported here; tables of several
(`comparison`, `ablation`, `ranks`), live states (`live_state`), whole runs (`run_record`) and calls that only run
forward (`inference`) have their own modules.
"""

from __future__ import annotations

from memlab.records.measurement import (
    LOOP,
    Category,
    Measurement,
    Phase,
    Profile,
    Rescue,
    StepRecord,
    TimelinePoint,
    measurement_of_steps,
    out_of_memory,
    ratio,
    thin,
)
from memlab.records.prediction import (
    Fit,
    Prediction,
    Verdict,
    fastest,
    prediction_of,
    speed_of,
)

__all__ = [
    "LOOP",
    "Category",
    "Fit",
    "Measurement",
    "Phase",
    "Prediction",
    "Profile",
    "Rescue",
    "StepRecord",
    "TimelinePoint",
    "Verdict",
    "fastest",
    "measurement_of_steps",
    "out_of_memory",
    "prediction_of",
    "ratio",
    "speed_of",
    "thin",
]
