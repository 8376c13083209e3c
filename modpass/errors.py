"""Every error that modpass raises on purpose.

Each message says which block, tensor or flag, what was found, what is allowed and what to do.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modpass.blocks import Skipped

__all__ = [
    "BlockError",
    "BuildError",
    "CapacityError",
    "ExportError",
    "InputError",
    "MissingExtraError",
    "ModpassError",
    "PickleError",
    "StateError",
    "TraceError",
    "VerificationError",
    "require",
]


class ModpassError(Exception):
    """The root of the tree: catch it to catch everything that modpass raises on purpose."""


class TraceError(ModpassError):
    """The model could not be traced into a graph that is parametric in batch and sequence."""


class InputError(ModpassError):
    """An argument, or an input of a model, is not what is needed."""


class BlockError(ModpassError):
    """A block was named that cannot be routed, or no block was found.

    skipped: the candidates that cannot be routed, where that is why.
    """

    def __init__(self, message: str, skipped: Sequence[Skipped] = ()) -> None:
        super().__init__(message)
        self.skipped = tuple(skipped)


class CapacityError(InputError):
    """A capacity outside (0, 1], or more tokens asked for than there are."""


class ExportError(ModpassError):
    """A model could not be lowered to ONNX with fixed shapes."""


class BuildError(ModpassError):
    """TensorRT refused an ONNX file, or would."""


class VerificationError(ModpassError):
    """A file is not what its manifest says, or an export does not compute what the model does."""


class StateError(ModpassError):
    """A saved model could not be written or read."""


class PickleError(StateError, pickle.PicklingError):
    """A traced model was pickled."""


class MissingExtraError(ModpassError):
    """An optional dependency is not installed; the message names the command that installs it."""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which command installs it.

    Raises:
        MissingExtraError: ``module`` is not installed.

    >>> require("json", extra="dev").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise MissingExtraError(
            f"this needs the package '{module}', which is not installed; "
            f"install it with: pip install 'modpass[{extra}]'"
        ) from e
