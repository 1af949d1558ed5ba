"""`clip_grad_norm_` on ranks: where an engine keeps gradients to itself, the loop's call would clip nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from memlab.errors import ScaleError

_original = nn.utils.clip_grad_norm_
Clip = Callable[[Iterable[nn.Parameter], float], torch.Tensor | None]


class Clipping:
    """Takes the place of torch's function in a rank's process, before the loop's modules are read.

    Attributes:
        engine_clips: the engine's way, once there is one.
    """

    def __init__(self) -> None:
        self.engine_clips: Clip = lambda _parameters, _norm: None
        nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = self._clip

    def _clip(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        listed: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = self.engine_clips(listed, max_norm)
        if norm is None:
            return _original(listed, max_norm, norm_type, *args, **kwargs)
        if norm_type != 2.0:
            raise ScaleError(
                f"clip_grad_norm_ with norm_type={norm_type:g}: ZeRO clips by the 2-norm; use --scale fsdp2"
            )
        return norm
