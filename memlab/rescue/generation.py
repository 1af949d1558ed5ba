"""`Generations`: calls of `generate`, run in parts of their rows where memory runs out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from memlab.rescue.evaluation import Evaluations, Run, WholeError
from memlab.runtime.surroundings import Surroundings
from memlab.techniques.accumulation.rows import unlike_rows
from memlab.techniques.accumulation.split import Call, Layout, layouts_of, row_ranges

if TYPE_CHECKING:
    from memlab.rescue.rescuer import Rescuer

_PLAIN = (torch.Tensor, bool, int, float, str, torch.device, torch.dtype)


class Generations(Evaluations):
    """Calls of `generate` likewise. Tokens of a row do not follow from those of others, and rows that end early are filled up."""

    _has_graphs = False

    def __init__(self, rescuer: Rescuer) -> None:
        super().__init__(rescuer)
        self._compared: set[Any] = set()  # kinds of calls whose rows were seen to be independent

    def generate(self, generate: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a generation, in parts where it does not fit."""
        passes = self._rescuer.evaluations
        if passes.is_under_way:
            return generate(*args, **kwargs)
        passes.is_under_way = True
        try:
            return self.run(generate, args, kwargs)
        finally:
            passes.is_under_way = False

    def _in_parts(self, whole: Call, parts: int) -> torch.Tensor:
        for name, leaf in zip(whole.spec.names(), whole.leaves, strict=True):
            if not (leaf is None or isinstance(leaf, _PLAIN) or name.endswith("['generation_config']")):
                raise WholeError(f"it is given a {type(leaf).__name__}, which it may write to", again=False)
        layout = next(iter(layouts_of(whole)), None)
        if layout is None or layout.rows < 2:
            raise WholeError("it has one row")
        if whole.kind not in self._compared:
            self._compare(whole, layout)
            self._compared.add(whole.kind)
        pieces = [layout.take(whole, *span) for span in row_ranges(layout.rows, min(parts, layout.rows))]
        return self._filled(whole, [self._tokens(piece, layout) for piece in pieces])

    def _compare(self, whole: Call, layout: Layout) -> None:
        rows = unlike_rows(whole, layout, 2)
        together, *apart = (self._tokens(layout.pick(whole, some), layout) for some in (rows, rows[:1], rows[1:]))
        if not torch.equal(together, self._filled(whole, apart)):
            raise WholeError("two of its rows give other tokens together than apart")

    def _tokens(self, part: Call, layout: Layout) -> torch.Tensor:
        output = self.checked(Surroundings(self.model), partial(part.run, self._run))
        is_tokens = isinstance(output, torch.Tensor) and output.dim() == 2 and not output.is_floating_point()
        if not is_tokens or len(output) != layout.rows_in(part):
            raise WholeError("it returns something else than one row of tokens for each")
        return cast("torch.Tensor", output)

    def _filled(self, whole: Call, parts: list[torch.Tensor]) -> torch.Tensor:
        longest = max(part.size(1) for part in parts)
        fill: Any = 0
        if any(part.size(1) < longest for part in parts):
            given = whole.spec.put(whole.leaves)[1]
            config = given.get("generation_config") or getattr(self.model, "generation_config", None)
            ends = [given.get(name, getattr(config, name, None)) for name in ("pad_token_id", "eos_token_id")]
            found = next((end for end in ends if end is not None), None)
            fill = next(iter(found), None) if isinstance(found, (list, tuple)) else found
            if not isinstance(fill, int):
                raise WholeError("its rows end at different lengths, and no pad_token_id says what follows them")
        return torch.cat([F.pad(part, (0, longest - part.size(1)), value=fill) for part in parts])
