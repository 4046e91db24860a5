# SPDX-License-Identifier: Apache-2.0
"""Exceptions that fp4lt raises.

Each derives from :class:`Error` and from the built-in exception a caller would expect, so both
``except fp4lt.errors.Error`` and ``except ValueError`` work.  Messages say what was given, what is
needed and what to do.
"""

from __future__ import annotations


class Error(Exception):
    """Base of everything fp4lt raises on purpose."""


class ArgumentError(Error, ValueError):
    """An argument has a value that the operation cannot take."""


class ShapeError(ArgumentError):
    """Extents that do not fit together, or not the format."""


class DTypeError(ArgumentError):
    """A dtype that the operation does not take."""


class LayoutError(ArgumentError):
    """Strides, transposition, overlap or scale layout that the operation cannot honour."""


class DeviceError(ArgumentError):
    """Tensors on different devices, or on one that the chosen backend does not serve."""


class CheckpointError(ArgumentError):
    """A checkpoint with a missing, damaged or contradictory tensor; the message names it."""


class UnsupportedError(Error, NotImplementedError):
    """Valid input that no usable backend, or not this build, can handle."""


class LibraryError(Error, RuntimeError):
    """A CUDA or cuBLAS call failed; the message has the call, the status' name and number."""


class DistributedError(Error, RuntimeError):
    """Another rank refused its input, disagrees, or cannot be reached."""
