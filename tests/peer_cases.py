# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for peers' libraries: what their calls mean, in plain torch, from their own layouts."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import presets
from benchmarks.peers import humming, marlin_layout
from benchmarks.peers.weights import decode

PEER = presets.MoEPreset(
    name="peer-tiny",
    model="none",
    hidden=256,
    intermediate=128,
    experts=5,
    top_k=2,
    activation="silu",
    order="gate_up",
    sweep=(1, 9),
    source="made up",
    note="",
)


def marlin_dense(codes: torch.Tensor, scales: torch.Tensor, global_scale: float) -> torch.Tensor:
    """One expert's weights (N, K) from Marlin's layout, by where the mma's fragments put them."""
    tiles, words = codes.shape
    rows, k = words // 2, 16 * tiles
    n_index, k_index = torch.arange(rows)[:, None], torch.arange(k)[None]
    in_k, in_n = k_index % 16, n_index % 64
    lane = (in_n % 8) * 4 + in_k % 8 // 2
    word = n_index // 64 * 128 + lane * 4 + in_n // 16
    place = in_k // 8 * 2 + in_k % 2 + 4 * (in_n % 16 // 8)
    shift = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])[place] * 4
    code = (codes[k_index // 16, word].long() >> shift) & 15
    values = decode((code[:, 0::2] | (code[:, 1::2] << 4)).to(torch.uint8))
    # Scale bytes are 5 exponent bits and 3 of mantissa: the middle of a half.
    halves = (scales.view(torch.uint8).to(torch.int16) << 7).view(torch.float16).float() / 128
    column = n_index % 64
    at = n_index // 64 * 64 + column % 8 * 8 + torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])[column // 8]
    scale = halves[k_index // 16, at]
    return values * (scale * (global_scale / marlin_layout.BIAS))


class VllmOperators:
    """vLLM's two operators on the CPU; the GEMM reads Marlin's layout."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def moe_align_block_size(
        self,
        ids: torch.Tensor,
        experts: int,
        block: int,
        order: torch.Tensor,
        owners: torch.Tensor,
        padded: torch.Tensor,
        mask: None,
        extra: None,
    ) -> None:
        assert ids.dtype == torch.int32
        slots = ids.numel()
        order.fill_(slots)
        place = 0
        for expert in range(experts):
            mine = (ids.flatten() == expert).nonzero().flatten()
            order[place : place + len(mine)] = mine.int()
            blocks = -(-len(mine) // block)
            owners[place // block : place // block + blocks] = expert
            place += blocks * block
        padded.fill_(place)

    def moe_wna16_marlin_gemm(self, *given: Any) -> torch.Tensor:
        out: torch.Tensor = given[1]
        (a, _, codes, bias, scales, a_scales, global_scale, zeros, locks) = given[:9]
        (order, owners, padded, weights, block, top_k, weighted, kind, m, n, k) = given[9:20]
        assert (bias, a_scales, zeros) == (None, None, None)
        assert a.shape == (m, k)
        assert out.shape == (m * top_k, n)
        assert (kind, given[20:]) == (562949953487106, (False, True, False, -1, -1, -1))
        assert locks.dtype == torch.int32
        self.calls.append((m, n, k, top_k, weighted, block))
        dense = [
            marlin_dense(c, s, float(g))
            for c, s, g in zip(codes, scales, global_scale, strict=True)
        ]
        rows = _by_block(a, order, owners, padded, block, top_k, dense, out)
        if weighted:
            rows *= weights.reshape(-1, 1)
        out.copy_(rows)
        return out


def _by_block(
    a: torch.Tensor,
    order: torch.Tensor,
    owners: torch.Tensor,
    padded: torch.Tensor,
    block: int,
    top_k: int,
    dense: list[torch.Tensor],
    out: torch.Tensor,
) -> torch.Tensor:
    """Each slot's row times its expert's matrix, float32."""
    rows = torch.full(out.shape, torch.nan)
    for place in range(int(padded)):
        slot = int(order[place])
        if slot < out.shape[0]:
            matrix = dense[int(owners[place // block])]
            rows[slot] = a[slot // top_k].float() @ matrix.t()
    return rows


def indexed_forward(
    layer: Any,
    *,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    zero_point: None,
    outputs: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_padded: torch.Tensor,
    locks: torch.Tensor,
    top_k: int,
    valid_shape_m: int,
    compute_config: str,
    tuning_config: str,
) -> None:
    """Humming's forward on weights that were left in checkpoint order."""
    assert outputs.shape == (valid_shape_m, layer.n)
    block = layer.block_rows(valid_shape_m, tuning_config)
    scale = weight_scale.float().repeat_interleave(16, 2) * weight_scale_2[:, None, None]
    dense = list(decode(weight) * scale)
    outputs.copy_(
        _by_block(inputs, sorted_ids, expert_ids, num_tokens_padded, block, top_k, dense, outputs)
    )


class HummingModules:
    """Stand-ins for humming's modules; weights stay in checkpoint order."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def __call__(self, name: str) -> Any:
        return {
            "humming.schema.modelopt": SimpleNamespace(ModeloptNvfp4WeightSchema=lambda: self),
            "humming.schema.humming": SimpleNamespace(HummingInputSchema=lambda: "input"),
            "humming.transform": SimpleNamespace(
                prepare_and_transform_humming_tensors=self.transform
            ),
            "humming.tune": SimpleNamespace(get_heuristics_config=self.table),
            "humming.config": SimpleNamespace(GemmType=SimpleNamespace(INDEXED="indexed")),
            "humming.kernel.humming": SimpleNamespace(HummingKernel=self),
            "humming.forward": SimpleNamespace(humming_forward=indexed_forward),
        }[name]

    def convert_humming(
        self, *, tensors: dict[str, torch.Tensor], shape_n_stacks: list[int], **rest: Any
    ) -> tuple[str, dict[str, torch.Tensor]]:
        assert tensors["weight"].shape[1] == shape_n_stacks[0]
        assert rest["param_dtype"] == torch.bfloat16
        return "schema", tensors

    def transform(
        self, *, tensors: dict[str, torch.Tensor], shape_n: int, shape_k: int, **rest: Any
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        assert (rest["weight_schema"], rest["input_schema"]) == ("schema", "input")

        def block_rows(rows: int, tuning: str) -> int:
            # Humming's launcher asks for one row first, whatever the call.
            assert json.loads(tuning)[0][0] == 0
            return int(
                next(c for low, high, c in json.loads(tuning) if low < rows <= high)["block_shape"][
                    0
                ]
            )

        layer = SimpleNamespace(n=shape_n, k=shape_k, block_rows=block_rows)
        layer.to_str = lambda: f"{shape_n}x{shape_k}"
        return layer, tensors

    def table(self, *, layer_config: Any, gemm_type: str, **options: Any) -> list[list[Any]]:
        assert gemm_type == "indexed"
        assert options == humming.OPTIONS
        # w2 has other blocks from 9 rows on, so that it needs an alignment of its own.
        large = 16 if layer_config.k == 128 else 8
        return [[0, 8, {"block_shape": [8, 1]}], [8, 64, {"block_shape": [large, 1]}]]

    def prepare_kernels(self, layer: str, compute: str, tuning: str, device: torch.device) -> None:
        assert json.loads(compute)["gemm_type"] == "indexed"
        self.compiled.append(layer)


class TritonModules:
    """Stand-ins for triton_kernels' modules; layouts are left as they are."""

    class FlexCtx(SimpleNamespace):
        pass

    class PrecisionConfig(SimpleNamespace):
        pass

    FP4 = "fp4"

    def __call__(self, name: str) -> Any:
        return self

    def make_default_matmul_mxfp4_w_layout(self, mx_axis: int) -> tuple[str, dict[str, int]]:
        return "values", {"mx_axis": mx_axis}

    def make_default_matmul_mxfp4_w_scale_layout(
        self, mx_axis: int, num_warps: int
    ) -> tuple[str, dict[str, int]]:
        return "scales", {"mx_axis": mx_axis, "num_warps": num_warps}

    def wrap_torch_tensor(self, tensor: torch.Tensor, dtype: str | None = None) -> torch.Tensor:
        return tensor

    def convert_layout(self, tensor: torch.Tensor, kind: str, **options: int) -> torch.Tensor:
        assert options["mx_axis"] == 1
        return tensor.mT.clone()

    def InFlexData(self) -> str:  # noqa: N802 - the library's name
        return "flex"

    def update_opt_flags_constraints(self, flags: dict[str, int]) -> None:
        assert flags == {"split_k": 1}

    def matmul_ogs(
        self,
        a: torch.Tensor,
        codes: torch.Tensor,
        bias: None,
        data: Any,
        *,
        precision_config: Any,
        gather_indx: torch.Tensor | None = None,
        scatter_indx: torch.Tensor | None = None,
        gammas: torch.Tensor | None = None,
    ) -> torch.Tensor:
        exponents = precision_config.weight_scale.float()[..., : codes.shape[2] * 2 // 32] - 127
        dense = decode(codes) * torch.exp2(exponents).repeat_interleave(32, 2)
        rows = a if gather_indx is None else a[gather_indx // data.top_k]
        y = torch.einsum("rk,rnk->rn", rows.float(), dense[data.owner])
        if scatter_indx is None:
            return y.bfloat16()
        assert gammas is not None
        terms = torch.empty_like(y)
        terms[scatter_indx] = y * gammas[:, None]
        return terms.view(-1, data.top_k, y.shape[1]).sum(1).bfloat16()[None]

    def routing(self, logits: torch.Tensor, top_k: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        values, ids = logits.topk(top_k, 1)
        order = ids.flatten().argsort(stable=True)
        gates = torch.softmax(values, 1).flatten()[order]
        owner = ids.flatten()[order]
        data = SimpleNamespace(top_k=top_k, owner=owner, gate_scal=gates)
        return data, order, order
