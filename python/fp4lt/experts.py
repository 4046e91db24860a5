# SPDX-License-Identifier: Apache-2.0
"""MoEWeights: the weights of a MoE block with their layout and activation."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fp4lt._interop import device_of, require_dtype, require_tensor, tracing
from fp4lt.arguments import check_bias, per_expert, require_device, tensors_of
from fp4lt.codec import check_global_scale
from fp4lt.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from fp4lt.formats import BLOCK
from fp4lt.problem import ACTIVATIONS, ORDERS, Activation, Operand, Order, format_name
from fp4lt.tensor import NVFP4Tensor

Parameter = torch.Tensor | float | None

_STATIC = ("order", "activation", "expert_start", "num_experts")
_SWIGLU_DEFAULTS = {"silu": (1.0, 0.0, None), "swigluoai": (1.702, 1.0, 7.0)}


@dataclass(frozen=True, eq=False, repr=False)
class MoEWeights:
    """Weights of a MoE block's local experts, with their layout and activation.

    Parameters
    ----------
    w13 : (E, 2I, H) or, without a gate, (E, I, H)
        NVFP4Tensor, bfloat16 or float16.  H and I are multiples of 16.
    w2 : (E, H, I), like `w13`
    order : "gate_up", "up_gate", "interleaved" or None
        Where w13's rows have the gate: the first half, the second half, or the even rows.  Required
        when there is a gate, since a wrong guess is silently wrong; None when there is none.
    activation : "silu", "swigluoai", "gelu", "gelu_tanh" or "relu2"
    gate_up_scales : (E, 2) float32, optional
        Factors of the gate's and the up's rows, in this column order whatever `order` is, on top of
        w13's own global scale.  Checkpoints have different ones for the two; both are exact.
    w13_bias : (E, 2I) or (E, I), optional
        In the order of w13's rows; any float dtype, kept as float32.
    w2_bias : (E, H), optional
    a1_scale, a2_scale : float or () or (E,) float32, optional
        Static global scales (multipliers) of the two GEMMs' activations, for recipe "w4a4".
        Without one, each row derives its own.
    swiglu_alpha, swiglu_beta : float or () or (E,) float32, optional
        ``gate * sigmoid(alpha * gate) * (up + beta)``: 1 and 0 for silu, 1.702 and 1 for swigluoai.
    swiglu_limit : float or () or (E,) float32, optional
        Cuts the gate from above and the up at both ends.  7 for swigluoai, none otherwise.
    expert_start : int
        Global id of the first local expert.
    num_experts : int, optional
        Experts in all; by default the local ones are the last.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, DeviceError, ArgumentError
    """

    w13: Operand
    w2: Operand
    _: KW_ONLY
    order: Order | None
    activation: Activation = "silu"
    gate_up_scales: torch.Tensor | None = None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    a1_scale: Parameter = None
    a2_scale: Parameter = None
    swiglu_alpha: Parameter = None
    swiglu_beta: Parameter = None
    swiglu_limit: Parameter = None
    expert_start: int = 0
    num_experts: int | None = None

    def __post_init__(self) -> None:
        self._check_weights()
        self._check_order()
        experts, device = self.num_local_experts, self.w13.device
        for name, width in (("w13_bias", self.w13.shape[1]), ("w2_bias", self.hidden_size)):
            bias = getattr(self, name)
            if bias is not None:
                checked = check_bias(f"MoEWeights: {name}", bias, experts, width, device)
                object.__setattr__(self, name, checked)
        for name in ("a1_scale", "a2_scale", "swiglu_alpha", "swiglu_beta", "swiglu_limit"):
            value = getattr(self, name)
            if value is not None:
                checked = per_expert(f"MoEWeights: {name}", value, experts, device)
                object.__setattr__(self, name, checked)
        for name in ("a1_scale", "a2_scale"):
            value = getattr(self, name)
            if value is not None:
                shapes = ((), "shared"), ((experts,), "one per expert")
                check_global_scale(f"MoEWeights: {name}", value, *shapes)
        self._check_swiglu()
        self._check_gate_up_scales()
        for name in ("expert_start", "num_experts"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (name == "num_experts" and value is None):
                raise ArgumentError(f"MoEWeights: {name}={value!r}; it must be an integer")
            if isinstance(value, bool) or (value is not None and value >= 1 << 31):
                raise ArgumentError(f"MoEWeights: {name}={value!r}; it must be less than 2^31")
        if self.num_experts is None:
            object.__setattr__(self, "num_experts", self.expert_start + experts)
        assert self.num_experts is not None
        if self.expert_start < 0 or self.expert_start + experts > self.num_experts:
            raise ArgumentError(
                f"MoEWeights: expert_start={self.expert_start} and {experts} local experts do not "
                f"fit into num_experts={self.num_experts}"
            )

    @property
    def num_local_experts(self) -> int:
        """E: experts whose weights are here."""
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w13.shape[2]

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self.w2.shape[2]

    @property
    def gated(self) -> bool:
        """Whether w13 has gate and up."""
        return self.order is not None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.w13.device

    def swiglu(self) -> tuple[torch.Tensor | float, torch.Tensor | float, Parameter]:
        """Alpha, beta and limit with the activation's defaults filled in."""
        alpha, beta, limit = _SWIGLU_DEFAULTS.get(self.activation, (1.0, 0.0, None))
        return (
            alpha if self.swiglu_alpha is None else self.swiglu_alpha,
            beta if self.swiglu_beta is None else self.swiglu_beta,
            limit if self.swiglu_limit is None else self.swiglu_limit,
        )

    def to(self, device: torch.device | str | int) -> MoEWeights:
        """The same weights on `device`."""
        device = device_of("MoEWeights", device)
        leaves, static = _flatten(self)
        return _unflatten([t if t is None else t.to(device) for t in leaves], static)

    def __repr__(self) -> str:
        last = self.expert_start + self.num_local_experts
        return (
            f"MoEWeights(experts {self.expert_start}:{last} of {self.num_experts}, "
            f"H={self.hidden_size}, I={self.intermediate_size}, {format_name(self.w13)}, "
            f"{self.activation}, order={self.order!r}, {self.device})"
        )

    def _check_weights(self) -> None:
        for name in ("w13", "w2"):
            w = getattr(self, name)
            if isinstance(w, torch.Tensor):
                require_dtype(f"MoEWeights: {name}", w, (torch.bfloat16, torch.float16))
            elif not isinstance(w, NVFP4Tensor):
                raise ArgumentError(
                    f"MoEWeights: {name} is a {type(w).__name__}; an NVFP4Tensor, or a bfloat16 or "
                    "float16 tensor, is needed"
                )
            if w.ndim != 3:
                raise ShapeError(
                    f"MoEWeights: {name} has shape {tuple(w.shape)}; it must be 3-D, one matrix "
                    "per expert"
                )
            if isinstance(w, NVFP4Tensor) and w.transposed:
                raise LayoutError(
                    f"MoEWeights: {name} is transposed; pass the weights as stored, (E, N, K)"
                )
            if isinstance(w, torch.Tensor) and w.stride(2) != 1:
                raise LayoutError(
                    f"MoEWeights: {name} has shape {tuple(w.shape)} and strides {w.stride()}; its "
                    "last dimension must be contiguous: call .contiguous()"
                )
        w13, w2 = self.w13, self.w2
        if format_name(w13) != format_name(w2):
            raise DTypeError(
                f"MoEWeights: w13 is {format_name(w13)} but w2 is {format_name(w2)}; both must be "
                "of one format"
            )
        require_device("MoEWeights: w2", tensors_of(w2)[0], w13.device)
        if w13.shape[0] != w2.shape[0] or w13.shape[0] == 0:
            raise ShapeError(
                f"MoEWeights: w13 has {w13.shape[0]} experts and w2 has {w2.shape[0]}; both need "
                "the same number, at least 1"
            )
        if w13.shape[2] != w2.shape[1]:
            raise ShapeError(
                f"MoEWeights: w13 {tuple(w13.shape)} has hidden size H={w13.shape[2]} but w2 "
                f"{tuple(w2.shape)} has H={w2.shape[1]}; w13 is (E, 2I, H) and w2 (E, H, I)"
            )
        for name, k in (("H", w13.shape[2]), ("I", w2.shape[2])):
            if k == 0 or k % BLOCK:
                raise ShapeError(f"MoEWeights: {name}={k}; it must be a multiple of {BLOCK}")

    def _check_order(self) -> None:
        rows, inter = self.w13.shape[1], self.w2.shape[2]
        if rows not in (inter, 2 * inter):
            raise ShapeError(
                f"MoEWeights: w13 has {rows} rows per expert and w2 has I={inter}; w13 needs "
                f"2I={2 * inter} rows with a gate, or I={inter} without"
            )
        gated = rows == 2 * inter
        if gated and self.order not in ORDERS:
            raise ArgumentError(
                f"MoEWeights: order={self.order!r}; w13 has gate and up rows, so order must be one "
                f"of {ORDERS}: where is the gate?"
            )
        if not gated and self.order is not None:
            raise ArgumentError(
                f"MoEWeights: order={self.order!r}, but w13 has I={inter} rows per expert and so "
                "no gate; pass order=None"
            )
        if self.activation not in ACTIVATIONS:
            raise ArgumentError(
                f"MoEWeights: activation={self.activation!r}; it must be one of {ACTIVATIONS}"
            )
        if self.activation == "swigluoai" and not gated:
            raise ArgumentError("MoEWeights: activation='swigluoai' needs a gate; w13 has none")

    def _check_swiglu(self) -> None:
        for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"):
            value = getattr(self, name)
            if value is None:
                continue
            if self.activation not in _SWIGLU_DEFAULTS or not self.gated:
                given = repr(self.activation) if self.gated else f"{self.activation!r} without gate"
                raise ArgumentError(
                    f"MoEWeights: {name} belongs to gated silu and swigluoai, not to {given}"
                )
            if value.device.type != "cpu" or tracing(value):
                continue
            if not bool(torch.isfinite(value).all()):
                raise ArgumentError(f"MoEWeights: {name} is {value.tolist()}; it must be finite")
            if name == "swiglu_limit" and not bool((value > 0).all()):
                raise ArgumentError(
                    f"MoEWeights: swiglu_limit is {value.tolist()}; it must be greater than 0"
                )

    def _check_gate_up_scales(self) -> None:
        scales = self.gate_up_scales
        if scales is None:
            return
        what = "MoEWeights: gate_up_scales"
        require_tensor(what, scales)
        if not self.gated:
            raise ArgumentError(f"{what} is given, but w13 has no gate; fold it into global_scale")
        require_device(what, scales, self.device)
        want = (self.num_local_experts, 2)
        check_global_scale(what, scales, (want, "columns gate, up"))
        object.__setattr__(self, "gate_up_scales", scales.contiguous())


_LEAVES = tuple(f.name for f in fields(MoEWeights) if f.name not in _STATIC)


def _flatten(w: MoEWeights) -> tuple[list[Any], tuple[Any, ...]]:
    return [getattr(w, name) for name in _LEAVES], tuple(getattr(w, name) for name in _STATIC)


def _flatten_with_keys(w: MoEWeights) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    leaves, static = _flatten(w)
    return [(pytree.GetAttrKey(n), t) for n, t in zip(_LEAVES, leaves, strict=True)], static


def _unflatten(leaves: Any, static: Any) -> MoEWeights:
    # Without checks: leaves may be fake tensors or placeholders.
    w = object.__new__(MoEWeights)
    for name, value in (*zip(_LEAVES, leaves, strict=True), *zip(_STATIC, static, strict=True)):
        object.__setattr__(w, name, value)
    return w


pytree.register_pytree_node(
    MoEWeights,
    _flatten,
    _unflatten,
    serialized_type_name="fp4lt.MoEWeights",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
