"""The code that asks something of an object of the user's: memlab's, a library's or the user's."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, TypeVar

import torch

_PASSED_OVER = ("memlab.runtime.touch", "memlab.runtime.away", "memlab.techniques.offload.lending", "torch")
OWN_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"
_PACKAGES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_INSTALLED = (sysconfig.get_path("stdlib"), OWN_FOLDER, "<frozen")
_DECORATES = "torch.utils._contextlib"  # with `torch.no_grad`, say
_OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType, GetSetDescriptorType)
# torch's functions in Python as they are before a loop exchanges any
_ORIGINALS = {
    each
    for home in (torch, torch.functional, torch.nn.functional, torch.autograd, torch.Tensor)
    for each in vars(home).values()
    if isinstance(each, FunctionType)
}
_BY_CODE = {each.__code__: each for each in _ORIGINALS if not each.__closure__}
_FOR_ASKERS: set[CodeType] = set()  # see `for_asker`
_Function = TypeVar("_Function", bound=Callable[..., Any])


def for_asker(function: _Function) -> _Function:
    """Mark a function that runs others for the code that has asked a mode, in whatever module that mode is."""
    _FOR_ASKERS.add(function.__code__)
    return function


def handed_over(function: Any) -> Any:
    """Return what a `__torch_function__` is to call for the function that it was told of: for it alone, as frames are counted.

    Torch's functions in Python hand over what is found under their names. Where the loop, or a library, has put another there that calls
    torch's, that one is under way already, and would be called twice.
    """
    if isinstance(function, _OF_C) or (isinstance(function, FunctionType) and function in _ORIGINALS):
        return function
    frame = sys._getframe(2)
    asking = frame.f_back
    if frame.f_globals.get("__name__") != "torch.overrides" or asking is None:
        return function
    code = asking.f_code
    if getattr(function, "__code__", None) is code:
        return function
    if code in _BY_CODE:
        return _BY_CODE[code]
    closure = tuple(CellType(asking.f_locals[name]) for name in code.co_freevars)
    return FunctionType(code, asking.f_globals, code.co_name, None, closure)


def is_installed(file: str) -> bool:
    """Return whether code of a file is a library's, Python's or memlab's, and not the user's."""
    # packages may lie in more places than this Python's own: the user's, the system's, another environment's
    is_package = any(folder in file for folder in _PACKAGES)
    return is_package or file.startswith(_INSTALLED)


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code runs in a frame; empty for none."""
    return str(frame.f_globals.get("__name__", ""))


def is_memlab_code(frame: FrameType | None) -> bool:
    """Return whether the code that asks, past torch's own between and modes that run its functions, is memlab's.

    Example:
        >>> script = {"__name__": "train"}
        >>> exec("import sys; frame = sys._getframe()", script)
        >>> is_memlab_code(script["frame"])
        False
    """
    while frame is not None:
        name = module_of(frame)
        if name in _PASSED_OVER or name.startswith("torch."):
            frame = frame.f_back
        elif name.partition(".")[0] != "memlab":
            return False
        else:
            asker = _who_asked_mode(frame)
            if asker is None:
                return True
            frame = asker
    return False


def _who_asked_mode(frame: FrameType) -> FrameType | None:
    """The code for which a mode of memlab's runs a function; None where it is no mode that does."""
    module = None if frame.f_code in _FOR_ASKERS else frame.f_globals
    above = frame
    while module in (None, above.f_globals) and above.f_back is not None:
        if above.f_code.co_name == "__torch_function__":
            return above.f_back
        above = above.f_back
    return None


def is_in_hook(frame: FrameType | None) -> bool:
    """Return whether the code that asks during a backward pass is a hook of the loop's, and not what the pass runs again."""
    is_past = False  # torch's own code, which the hook calls
    while frame is not None:
        name = module_of(frame)
        is_torchs = name.startswith("torch.") and name != _DECORATES
        if name == "torch.autograd.graph":  # which calls the engine
            return True
        if name.partition(".")[0] == "memlab" or (is_past and is_torchs):
            return False
        is_past = not is_torchs
        frame = frame.f_back
    return True  # on a thread of the engine's own
