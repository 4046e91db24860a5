# SPDX-License-Identifier: Apache-2.0
"""triton_kernels' matmul_ogs on MXFP4 weights, as vLLM vendors and configures it on Hopper.

Another number format: 4.25 bits a weight against NVFP4's 4.5, and the weights are rounded anew.
Its routing computes top-k and softmax from logits, and the sum over experts is in the second GEMM.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from benchmarks.accounting import WeightFormat
from benchmarks.peers import bundle
from benchmarks.peers.base import Block, Inputs, Peer, Shape
from benchmarks.peers.mxfp4_format import BLOCK, Mxfp4, requantize
from benchmarks.peers.weights import Weights

_NOWHERE = -1e30  # logit of an expert that a token does not go to


def _module(name: str) -> Any:
    return importlib.import_module(f"triton_kernels.{name}")


def _in_layout(matrix: Mxfp4) -> tuple[Any, Any]:
    """The matrix in the layout that the library chooses for this GPU, as it takes it."""
    tensor, ogs = _module("tensor"), _module("matmul_ogs")
    layouts = _module("tensor_details.layout")
    kind, options = layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    codes = tensor.wrap_torch_tensor(matrix.codes.mT, dtype=tensor.FP4)
    codes = tensor.convert_layout(codes, kind, **options)
    kind, options = layouts.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    scales = torch.nn.functional.pad(matrix.scales, (0, -matrix.scales.shape[-1] % 4))
    scales = tensor.convert_layout(tensor.wrap_torch_tensor(scales.mT), kind, **options)
    flex = ogs.FlexCtx(rhs_data=_module("numerics").InFlexData())
    return codes, ogs.PrecisionConfig(weight_scale=scales, flex_ctx=flex)


class TritonMxfp4Block(Block):
    """See the module."""

    def __init__(self, weights: Weights, copies: int) -> None:
        super().__init__(weights, copies)
        self._matmul = _module("matmul_ogs").matmul_ogs
        self._routing = _module("routing").routing
        _module("matmul_ogs_details.opt_flags").update_opt_flags_constraints({"split_k": 1})
        self._stored = requantize(weights.w13), requantize(weights.w2)
        self._w13, self._w2 = (
            [_in_layout(matrix) for _ in range(copies)] for matrix in self._stored
        )

    def dense(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        w13, w2 = self._stored
        return w13.dense(expert), w2.dense(expert)

    def inputs(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Inputs:
        # Softmax over the chosen logs of weights that sum to 1 gives these weights.
        call = super().inputs(x, ids, weights)
        logits = torch.full((ids.shape[0], self.experts), _NOWHERE, device=x.device)
        logits.scatter_(1, ids.long(), call.weights.log())
        return call._replace(logits=logits)

    def plan(self, call: Inputs) -> Any:
        return self._routing(call.logits, call.ids.shape[1])

    def gemm1(self, call: Inputs, plan: Any, copy: int = 0) -> torch.Tensor:
        data, gather, _ = plan
        codes, config = self._w13[copy]
        h: torch.Tensor = self._matmul(
            call.x, codes, None, data, gather_indx=gather, precision_config=config
        )
        return h.view(-1, 2 * self.intermediate)

    def gemm2(self, call: Inputs, plan: Any, u: torch.Tensor, copy: int = 0) -> torch.Tensor:
        data, _, scatter = plan
        codes, config = self._w2[copy]
        y: torch.Tensor = self._matmul(
            u,
            codes,
            None,
            data,
            scatter_indx=scatter,
            precision_config=config,
            gammas=data.gate_scal,
        )
        return y

    def combine(self, call: Inputs, plan: Any, z: torch.Tensor) -> torch.Tensor:
        return z.view(-1, self.hidden)


class TritonMxfp4(Peer):
    """See the module."""

    name = "triton-mxfp4"
    weight_format: ClassVar[WeightFormat] = "mxfp4"

    def load(self) -> None:
        importlib.import_module("triton")
        bundle.load_package("triton_kernels")
        for name in ("matmul_ogs", "routing", "numerics", "tensor"):
            _module(name)

    def refusal(self, shape: Shape) -> str | None:
        if shape.top_k == 1:
            return "its softmax over a single logit is 1, whatever the router weight"
        for name, (_, k) in (("w13", shape.w13), ("w2", shape.w2)):
            if k % BLOCK:
                return f"MXFP4 has blocks of {BLOCK}, and {name} has K = {k}"
        return None

    def prepare(
        self, weights: Weights, *, tokens: Sequence[int], top_k: int, copies: int = 1
    ) -> TritonMxfp4Block:
        del tokens, top_k
        return TritonMxfp4Block(weights, copies)
