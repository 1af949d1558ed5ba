"""`InferenceCell`: `%%memfit --inference`. The model's calls run forward only while the cell does, and are measured."""

from __future__ import annotations

import gc
from contextlib import ExitStack

from IPython.core.error import UsageError
from torch import nn

from memlab.errors import WorkloadError
from memlab.inferring.inference import Inference, explained, inference, inference_of
from memlab.jupyter import cells, shown_errors
from memlab.jupyter.display import show, tell
from memlab.jupyter.first_call import FirstCall
from memlab.jupyter.history import History
from memlab.jupyter.notebook import Notebook, one_line
from memlab.jupyter.parser import CellOptions, one_model
from memlab.measuring.device import device_for
from memlab.records.inference import CallKind, InferenceRecord
from memlab.report.inference import batch_line, graph_line, lines
from memlab.runtime.namespace import find_model
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.ownership import WITHOUT_VALUES, optimizers_of
from memlab.runtime.workload import describe_model
from memlab.units import format_bytes

_NO_MODEL = "no model found: the cell named no torch.nn.Module with parameters, and called none"
_NO_CALL = (
    "no call of the model was seen, so nothing was measured: forward (model(…)) and generate are taken over, calls of its "
    "parts and other methods are not"
)


class InferenceCell:
    """Runs one cell."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._run_of_model: Inference | None = None
        self._undo = ExitStack()

    def run(self, options: CellOptions, source: cells.CellSource) -> None:
        try:
            with one_line():
                self._find(options, source)
            outcome = cells.run(self._notebook.shell, source)
            if outcome.error is None or isinstance(outcome.error, KeyboardInterrupt):
                with one_line(), cells.beside("the receipt"):
                    self._show_receipt(options, is_whole=outcome.error is None)
        finally:
            self._give_back()
        if outcome.error is not None:
            self._raise(outcome, outcome.error, options)

    # -- before the cell -----------------------------------------------------------------------

    def _find(self, options: CellOptions, source: cells.CellSource) -> None:
        model = find_model(
            dict(self._notebook.shell.user_ns), source.python, one_model(options.models, "an inference cell")
        )
        self._notebook.background.require_other(model)
        if model is not None:
            self._take(model, options)
        else:
            self._undo.enter_context(FirstCall(lambda called: self._take(_whole(called), options)))

    def _take(self, model: nn.Module, options: CellOptions) -> bool:
        left = inference_of(model)
        if left is not None:  # a cell before had no room to give the weights back
            left.undo()
        if next(model.parameters()).is_meta:
            raise WorkloadError(WITHOUT_VALUES.format(type(model).__name__))
        capacity_bytes = options.capacity_bytes or self._notebook.config.capacity_bytes
        device = device_for(next(model.parameters()).device, capacity_bytes)
        self._undo.callback(device.close)
        flags = str(options.plan) if options.plan is not None else ""
        self._run_of_model = inference(model, flags, device=device, optimizers=optimizers_of(model))
        return True

    # -- after it ------------------------------------------------------------------------------

    def _give_back(self) -> None:
        with self._undo, one_line():
            if self._run_of_model is not None:
                self._run_of_model.undo()

    def _show_receipt(self, options: CellOptions, *, is_whole: bool) -> None:
        run = self._run_of_model
        if run is None or not run.records:
            tell(_NO_MODEL if run is None else _NO_CALL)
            return
        for record in run.records:
            said = lines(record)
            if is_whole:
                said += (*self._graph(run, record), *self._batch(run, record, options))
            history = self._notebook.inferences.setdefault(run.model, {}).setdefault(record.kind, History())
            title = " · ".join([f"inference ({record.kind})", describe_model(run.model), record.device])
            history.add(title, [record.measurement], said)
            show(history.receipt())

    def _graph(self, run: Inference, record: InferenceRecord) -> tuple[str, ...]:
        wanted = record.kind is CallKind.FORWARD and self._notebook.config.predict
        graph_bytes = run.graph_bytes() if wanted else None
        return (graph_line(graph_bytes),) if graph_bytes else ()

    def _batch(self, run: Inference, record: InferenceRecord, options: CellOptions) -> tuple[str, ...]:
        budget_bytes = options.budget_bytes or self._notebook.config.budget_bytes or run.capacity_bytes
        advice = record.advise(budget_bytes) if budget_bytes is not None else None
        return (batch_line(advice, record),) if advice is not None else ()

    def _raise(self, outcome: cells.Outcome, error: BaseException, options: CellOptions) -> None:
        refusal = shown_errors.refusal_in(error)
        if refusal is not None:
            raise UsageError(str(refusal))
        if sentence := explained(error):
            raise UsageError(sentence)
        advice = self._advice(options) if is_out_of_memory(error) else ""
        cells.raise_shown(self._notebook.shell, outcome, advice)

    def _advice(self, options: CellOptions) -> str:
        run = self._run_of_model
        record = run.record if run is not None and run.records else None
        capacity_bytes = run.capacity_bytes if run is not None else None
        advice = record.advise(capacity_bytes) if record is not None and capacity_bytes is not None else None
        fits = (
            f" (up to {advice.rows:,} fit into {format_bytes(advice.budget_bytes)})" if advice and advice.rows else ""
        )
        rounded = "" if options.plan is not None else ", or %%memfit --inference --bf16, which halves weights and cache"
        return f"memfit: out of memory in a call that only runs forward. Try next: fewer rows at a time{fits}{rounded}"


def _whole(called: nn.Module) -> nn.Module:
    """The model that a called module is part of, where `generate` calls that part by itself (an encoder)."""
    others = (value for value in gc.get_objects() if issubclass(type(value), nn.Module) and value is not called)
    generating = (model for model in others if callable(getattr(type(model), "generate", None)))
    return next((model for model in generating if any(child is called for child in model.children())), called)
