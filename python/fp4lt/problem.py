# SPDX-License-Identifier: Apache-2.0
"""What is asked of a backend: static descriptions, and the tensors of one call.

A problem is hashable and prints as one line; plans and caches are keyed by it.  A call carries
checked tensors only: everything a user can get wrong has been refused before one is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import torch

from fp4lt._interop import dtype_name
from fp4lt.errors import ArgumentError
from fp4lt.tensor import NVFP4Tensor

Recipe: TypeAlias = Literal["w4a4", "w4a16"]
Order: TypeAlias = Literal["gate_up", "up_gate", "interleaved"]
Activation: TypeAlias = Literal["silu", "swigluoai", "gelu", "gelu_tanh", "relu2"]

RECIPES: Final = get_args(Recipe)
ORDERS: Final = get_args(Order)
ACTIVATIONS: Final = get_args(Activation)

Operand: TypeAlias = NVFP4Tensor | torch.Tensor


def format_name(operand: Operand) -> str:
    """``"nvfp4"`` or the name of a dense operand's dtype."""
    return "nvfp4" if isinstance(operand, NVFP4Tensor) else dtype_name(operand.dtype)


def check_recipe(what: str, recipe: str) -> None:
    """Refuse a recipe that does not exist."""
    if recipe not in RECIPES:
        raise ArgumentError(f"{what}: recipe={recipe!r}; it must be one of {RECIPES}")


def check_backend(what: str, backend: str) -> None:
    """Refuse a backend that is no name; whether there is one of that name is seen later."""
    if not isinstance(backend, str):
        raise ArgumentError(f"{what}: backend={backend!r}; it must be 'auto' or a backend's name")


@dataclass(frozen=True)
class GroupedProblem:
    """A grouped GEMM without its rows: (M, K) times `experts` matrices (N, K).

    Attributes
    ----------
    a_format, b_format : str
        "nvfp4", "bfloat16", "float16" or, for activations, "float32".
    recipe : str
        For dense activations on NVFP4 weights: "w4a4" rounds them to NVFP4, "w4a16" does not.
    """

    experts: int
    n: int
    k: int
    a_format: str
    b_format: str
    out_dtype: torch.dtype
    recipe: str

    @property
    def quantizes(self) -> bool:
        """Whether the activations are rounded to NVFP4 by the call."""
        return self.b_format == "nvfp4" and self.a_format != "nvfp4" and self.recipe == "w4a4"

    def __str__(self) -> str:
        recipe = f" {self.recipe}" if self.b_format == "nvfp4" else ""
        return (
            f"grouped_mm E={self.experts} N={self.n} K={self.k} {self.a_format} x {self.b_format} "
            f"-> {dtype_name(self.out_dtype)}{recipe}"
        )


class GroupedCall(NamedTuple):
    """Tensors of one grouped GEMM."""

    a: Operand
    """(M, K)."""
    b: Operand
    """(E, N, K), not transposed; dense operands have a contiguous K."""
    ends: torch.Tensor
    """(E,) end offsets: int64 in host memory, checked; or on the device as given, unchecked."""
    bias: torch.Tensor | None
    """(E, N) float32."""
    alpha: torch.Tensor | None
    """(E,) float32."""
    a_scale: torch.Tensor | None
    """() or (E,) float32: static global scale of the activations."""
    out: torch.Tensor
    """(M, N)."""


@dataclass(frozen=True)
class MoEProblem:
    """A MoE block without its tokens."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    dtype: torch.dtype
    w_format: str
    recipe: str
    order: str | None
    activation: str

    @property
    def quantizes(self) -> bool:
        """Whether activations are rounded to NVFP4."""
        return self.w_format == "nvfp4" and self.recipe == "w4a4"

    def __str__(self) -> str:
        recipe = f" {self.recipe}" if self.w_format == "nvfp4" else ""
        return (
            f"moe E={self.experts} H={self.hidden} I={self.intermediate} top-{self.top_k} "
            f"{dtype_name(self.dtype)} x {self.w_format}{recipe} {self.activation} "
            f"{self.order or 'ungated'}"
        )


class MoECall(NamedTuple):
    """Tensors and parameters of one MoE block."""

    hidden: torch.Tensor
    """(T, H)."""
    w13: Operand
    """(E, 2I, H) or (E, I, H)."""
    w2: Operand
    """(E, H, I)."""
    topk_weights: torch.Tensor
    """(T, k) float32."""
    topk_ids: torch.Tensor
    """(T, k) int64, on CUDA also int32: global ids."""
    expert_start: int
    gate_up_scales: torch.Tensor | None
    """(E, 2) float32, columns gate then up."""
    w13_bias: torch.Tensor | None
    """(E, 2I) or (E, I) float32."""
    w2_bias: torch.Tensor | None
    """(E, H) float32."""
    a1_scale: torch.Tensor | None
    """() or (E,) float32."""
    a2_scale: torch.Tensor | None
    alpha: torch.Tensor | float
    """Of silu and swigluoai: a number, or () or (E,) float32."""
    beta: torch.Tensor | float
    limit: torch.Tensor | float | None
    router_weight_on_input: bool
    out: torch.Tensor
    """(T, H)."""


class MoETrace(NamedTuple):
    """A backend's own intermediate values of one MoE block, for checking it stage by stage.

    Rows are sorted by local expert, then by slot ``t * k + j``; M is their number.
    """

    rows_token: torch.Tensor
    """(M,) int64: token of each row."""
    rows_expert: torch.Tensor
    """(M,) int64: local expert of each row."""
    slot_row: torch.Tensor
    """(T, k) int64: row of each slot, -1 where it contributes nothing."""
    a1: Operand
    """(M, H): what w13 was multiplied with."""
    h: torch.Tensor
    """(M, 2I) or (M, I) float32, with all scales and biases, columns in the weights' order."""
    a2: Operand
    """(M, I): what w2 was multiplied with."""
    z: torch.Tensor
    """(M, H) float32, with scales and biases."""
    y: torch.Tensor
    """(T, H)."""
