# SPDX-License-Identifier: Apache-2.0
"""NVFP4Tensor: codes, block scales and global scale of one matrix or of a stack of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fp4lt._interop import device_of, require_dtype, tracing
from fp4lt.codec import (
    check_global_scale,
    dequantize_parts,
)
from fp4lt.errors import ArgumentError, LayoutError, ShapeError
from fp4lt.formats import BLOCK
from fp4lt.layout import padded_scale_shape, tile_scales, untile_scales


@dataclass(frozen=True, eq=False, repr=False)
class NVFP4Tensor:
    """A matrix (N, K) or a stack of matrices (E, N, K) in NVFP4.

    With b = k // 16 the block that k is in::

        value[n, k] = e2m1(code[n, k]) * e4m3(scale[n, b]) * global_scale

    Every scale is a multiplier.  The classmethods take other conventions and say so in their names.
    The object is frozen and shares the memory of what it was made from.

    Parameters
    ----------
    codes : (..., N, K/2) uint8
        Even k in the low nibble.  Rows without gaps; K a positive multiple of 16.
    scales : (..., round_up(N, 128), round_up(K/16, 4)) float8_e4m3fn
        In 128x4 tiles.  A sign bit (a byte from 0x80 on) is refused: cuBLASLt's scale type has
        none.  What lies in the padding is never read.
    global_scale : () or (E,) or (M,) float32
        Shared, or one per expert of a 3-D stack, or one per row of a 2-D activation matrix.
    transposed : bool
        Set by :attr:`mT`.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, ArgumentError
        If the parts do not fit together.  Values are checked in host memory only; see
        :meth:`validate` for the rest.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    transposed: bool = False

    def __post_init__(self) -> None:
        self._check_parts()
        if self.codes.device.type == "cpu" and not tracing(*self._parts):
            self.validate()

    @property
    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes, self.scales, self.global_scale

    def _check_parts(self) -> NVFP4Tensor:
        """Refuse parts that do not fit together, or a global scale that is none."""
        self.check_layout()
        per = "one per expert" if self.codes.ndim == 3 else "one per row"
        shapes = ((), "shared"), ((self.codes.shape[0],), per)
        check_global_scale("NVFP4Tensor: global_scale", self.global_scale, *shapes)
        return self

    def check_layout(self) -> None:
        """Refuse dtypes, shapes, devices and strides that do not fit, looking at no value."""
        codes, scales, g = self.codes, self.scales, self.global_scale
        for name, t in (("codes", codes), ("scales", scales), ("global_scale", g)):
            if not isinstance(t, torch.Tensor):
                raise ArgumentError(
                    f"NVFP4Tensor: {name} is a {type(t).__name__}; a torch.Tensor is needed"
                )
        require_dtype("NVFP4Tensor: codes", codes, (torch.uint8,))
        require_dtype("NVFP4Tensor: scales", scales, (torch.float8_e4m3fn,))
        _check_code_shape("NVFP4Tensor", codes)
        rows, k = codes.shape[-2], codes.shape[-1] * 2
        want = (*codes.shape[:-2], *padded_scale_shape(rows, k))
        if tuple(scales.shape) != want:
            raise ShapeError(
                f"NVFP4Tensor: codes {tuple(codes.shape)} need tiled scales {want}, but scales "
                f"have shape {tuple(scales.shape)}; row-major scales go through "
                "from_linear_scales()"
            )
        if not codes.device == scales.device == g.device:
            raise ArgumentError(
                f"NVFP4Tensor: codes are on {codes.device}, scales on {scales.device}, "
                f"global_scale on {g.device}; all must be on one device"
            )
        for name, t in (("codes", codes), ("scales", scales)):
            if not _inner_contiguous(t) and t.numel():
                raise LayoutError(
                    f"NVFP4Tensor: {name} has shape {tuple(t.shape)} and strides {t.stride()}; "
                    "each matrix must lie without gaps: call .contiguous()"
                )
        require_dtype("NVFP4Tensor: global_scale", g, (torch.float32,))
        if tuple(g.shape) not in ((), (codes.shape[0],)):
            raise ShapeError(
                f"NVFP4Tensor: global_scale has shape {tuple(g.shape)}; it must be () or "
                f"({codes.shape[0]},)"
            )

    @classmethod
    def _make(
        cls, codes: Any, scales: Any, global_scale: Any, transposed: bool = False
    ) -> NVFP4Tensor:
        """Build without checks, from parts that are known to fit."""
        if torch.compiler.is_dynamo_compiling():
            # A constructor, since torch 2.4 cannot trace __new__; checks see fake tensors only.
            return NVFP4Tensor(codes, scales, global_scale, transposed)
        self = object.__new__(cls)
        object.__setattr__(self, "codes", codes)
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "global_scale", global_scale)
        object.__setattr__(self, "transposed", transposed)
        return self

    @classmethod
    def from_tiled_scales(
        cls, codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor
    ) -> NVFP4Tensor:
        """From scales that are in 128x4 tiles already; uint8 scales are taken as e4m3 bytes.

        Shapes as in the class; everything is a multiplier.
        """
        return cls(codes, _as_e4m3("from_tiled_scales", scales), global_scale)

    @classmethod
    def from_linear_scales(
        cls, codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor
    ) -> NVFP4Tensor:
        """From row-major scales (..., N, K/16), float8_e4m3fn or uint8; they are copied into tiles.

        Everything is a multiplier.
        """
        scales = _as_e4m3("from_linear_scales", scales)
        require_dtype("from_linear_scales: codes", codes, (torch.uint8,))
        _check_code_shape("from_linear_scales", codes)
        want = (*codes.shape[:-1], codes.shape[-1] * 2 // BLOCK)
        if tuple(scales.shape) != want:
            raise ShapeError(
                f"from_linear_scales: codes {tuple(codes.shape)} need scales {want}, but they have "
                f"shape {tuple(scales.shape)}"
            )
        return cls(codes, tile_scales(scales), global_scale)

    @classmethod
    def from_modelopt(
        cls, weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor
    ) -> NVFP4Tensor:
        """From ModelOpt's tensors of one linear layer, or of a stack of experts.

        Parameters
        ----------
        weight : (..., N, K/2) uint8
        weight_scale : (..., N, K/16) float8_e4m3fn
            Row-major.
        weight_scale_2 : () or (1,) or (E,) float32
            amax / 2688, a multiplier.
        """
        return cls.from_linear_scales(weight, weight_scale, _stored_global(weight, weight_scale_2))

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: torch.Tensor,
        weight_scale: torch.Tensor,
        weight_global_scale: torch.Tensor,
    ) -> NVFP4Tensor:
        """From compressed-tensors' tensors of one linear layer, or of a stack of experts.

        Parameters
        ----------
        weight_packed : (..., N, K/2) uint8
        weight_scale : (..., N, K/16) float8_e4m3fn
            Row-major.
        weight_global_scale : () or (1,) or (E,) or (E, 1) float32
            2688 / amax, a **divisor**: its reciprocal, taken once in fp32, is the global scale.
        """
        divisor = _stored_global(weight_packed, weight_global_scale)
        require_dtype("from_compressed_tensors: weight_global_scale", divisor, (torch.float32,))
        return cls.from_linear_scales(weight_packed, weight_scale, divisor.reciprocal())

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical extents: (N, K) or (E, N, K), the last two swapped when transposed."""
        *lead, rows, half = self.codes.shape
        return (*lead, half * 2, rows) if self.transposed else (*lead, rows, half * 2)

    @property
    def ndim(self) -> int:
        """2 or 3."""
        return self.codes.ndim

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return self.codes.device

    @property
    def mT(self) -> NVFP4Tensor:  # noqa: N802 - torch's name
        """The transpose of the last two dimensions; nothing is copied."""
        return self._make(self.codes, self.scales, self.global_scale, not self.transposed)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values in `dtype` (float32, float16 or bfloat16) and this tensor's logical shape."""
        if tracing(*self._parts):
            values: torch.Tensor = torch.ops.fp4lt.dequantize(*self._parts, dtype)
        else:
            values = dequantize_parts(*self._parts, dtype)
        return values.mT if self.transposed else values

    def to(self, device: torch.device | str | int) -> NVFP4Tensor:
        """The same tensor on `device`; itself if it is there already."""
        device = device_of("NVFP4Tensor", device)
        codes, scales = self.codes.to(device), self.scales.to(device)
        if codes is self.codes:
            return self
        return self._make(codes, scales, self.global_scale.to(device), self.transposed)

    def __getitem__(self, index: int | slice) -> NVFP4Tensor:
        """One expert (2-D result) or a range of experts (a view) of a 3-D stack."""
        if self.ndim != 3:
            raise ShapeError(
                f"indexing selects experts of a 3-D NVFP4Tensor; this one has shape {self.shape}"
            )
        if not isinstance(index, (int, slice)) or isinstance(index, bool):
            raise ArgumentError(f"an NVFP4Tensor is indexed by an int or a slice, not by {index!r}")
        if isinstance(index, int) and not -len(self) <= index < len(self):
            raise IndexError(f"expert {index} of a stack of {len(self)}")
        g = self.global_scale[index] if self.global_scale.ndim else self.global_scale
        return self._make(self.codes[index], self.scales[index], g, self.transposed)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch cannot pickle float8 storage everywhere; bytes it can.
        parts = (self.codes, self.scales.view(torch.uint8), self.global_scale, self.transposed)
        return _from_bytes, parts

    def __len__(self) -> int:
        """Experts of a stack, or first extent of a matrix."""
        return self.shape[0]

    def validate(self) -> NVFP4Tensor:
        """Check the values, on whatever device (a synchronisation and a copy off the CPU).

        Raises
        ------
        ArgumentError
            If a scale byte inside the matrix has its sign bit set, or a global scale is not finite
            and positive.
        """
        per = "one per expert" if self.ndim == 3 else "one per row"
        check_global_scale(
            "NVFP4Tensor: global_scale",
            self.global_scale.cpu(),
            ((), "shared"),
            ((self.codes.shape[0],), per),
        )
        bytes_ = self.scales.view(torch.uint8)
        if self.scales.numel() == 0 or not bool((bytes_ >= 0x80).any()):
            return self
        # Only the padding may hold such bytes, since nobody reads it.
        rows, blocks = self.codes.shape[-2], self.codes.shape[-1] * 2 // BLOCK
        linear = untile_scales(bytes_.cpu(), rows, blocks)
        bad = torch.nonzero(linear >= 0x80)
        if len(bad):
            *expert, row, block = (int(i) for i in bad[0])
            where = f"expert {expert[0]}, " if expert else ""
            raise ArgumentError(
                f"NVFP4Tensor: the scale of {where}row {row}, block {block} is byte "
                f"0x{int(linear[tuple(bad[0])]):02X}, with its sign bit set "
                f"({len(bad)} such bytes); block scales are magnitudes. Are these tiled "
                "scales given as linear, or the reverse?"
            )
        return self

    def __repr__(self) -> str:
        g = "shared" if self.global_scale.ndim == 0 else f"{self.global_scale.shape[0]} of them"
        flag = ", transposed" if self.transposed else ""
        return f"NVFP4Tensor(shape={self.shape}, global_scale: {g}, device={self.device}{flag})"


def _from_bytes(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, transposed: bool
) -> NVFP4Tensor:
    return NVFP4Tensor._make(codes, scales.view(torch.float8_e4m3fn), global_scale, transposed)


def _inner_contiguous(t: torch.Tensor) -> bool:
    return t.stride(-1) == 1 and (t.stride(-2) == t.shape[-1] or t.shape[-2] <= 1)


def _check_code_shape(what: str, codes: torch.Tensor) -> None:
    if codes.ndim not in (2, 3):
        raise ShapeError(
            f"{what}: codes have shape {tuple(codes.shape)}; it must be (N, K/2) or (E, N, K/2)"
        )
    k = codes.shape[-1] * 2
    if k == 0 or k % BLOCK:
        raise ShapeError(
            f"{what}: codes have shape {tuple(codes.shape)}, so K={k}; "
            f"K must be a positive multiple of {BLOCK}"
        )


def _as_e4m3(what: str, scales: torch.Tensor) -> torch.Tensor:
    require_dtype(f"{what}: scales", scales, (torch.float8_e4m3fn, torch.uint8))
    return scales.view(torch.float8_e4m3fn)


def _stored_global(codes: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A checkpoint's global scale as () or (E,): files also use (1,) and (E, 1)."""
    if codes.ndim == 3 and stored.numel() == codes.shape[0] and stored.ndim:
        return stored.reshape(-1)
    return stored.reshape(()) if stored.numel() == 1 else stored


def _flatten(t: NVFP4Tensor) -> tuple[list[Any], bool]:
    return [t.codes, t.scales, t.global_scale], t.transposed


def _flatten_with_keys(t: NVFP4Tensor) -> tuple[list[tuple[Any, Any]], bool]:
    names = ("codes", "scales", "global_scale")
    return [(pytree.GetAttrKey(name), getattr(t, name)) for name in names], t.transposed


def _unflatten(parts: Any, transposed: Any) -> NVFP4Tensor:
    # Parts may be anything here: fake tensors, ints, None.
    codes, scales, global_scale = parts
    return NVFP4Tensor._make(codes, scales, global_scale, transposed)


pytree.register_pytree_node(
    NVFP4Tensor,
    _flatten,
    _unflatten,
    serialized_type_name="fp4lt.NVFP4Tensor",
    flatten_with_keys_fn=_flatten_with_keys,
)
