# SPDX-License-Identifier: Apache-2.0
"""Layers to time: random ones of a preset's shape, and real ones from a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import fp4lt
from benchmarks import accounting, presets, routing

CHECK_CALL = 2**31  # a call number that no timed call reaches
_SCALE_BYTES = (0x68, 0x7F)  # e4m3 64 to 448: block maxima within 3 octaves of the tensor's


@dataclass(frozen=True)
class MoEBatch:
    """One call of a MoE block: ``x`` (T, H) bf16, ``routing`` of its T tokens."""

    x: torch.Tensor
    routing: routing.Routing
    work: accounting.Work


@dataclass(frozen=True)
class GemmBatch:
    """One call of a grouped GEMM: ``x`` (M, K) bf16, ``offs`` (E,) int32 END offsets."""

    x: torch.Tensor
    offs: torch.Tensor
    work: accounting.Work


Batch = MoEBatch | GemmBatch


@dataclass(frozen=True)
class MoELayer:
    """A MoE block with its inputs for the largest T of the sweep."""

    name: str
    title: str
    weights: fp4lt.MoEWeights
    top_k: int
    sweep: tuple[int, ...]
    x: torch.Tensor
    seed: int
    kind: str = "moe"

    @property
    def matrices(self) -> tuple[fp4lt.NVFP4Tensor, fp4lt.NVFP4Tensor]:
        """``w13`` and ``w2``, known to be NVFP4."""
        w13, w2 = self.weights.w13, self.weights.w2
        assert isinstance(w13, fp4lt.NVFP4Tensor)
        assert isinstance(w2, fp4lt.NVFP4Tensor)
        return w13, w2

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of each expert's matrices."""
        w13, w2 = self.matrices
        return ((w13.shape[1], w13.shape[2]), (w2.shape[1], w2.shape[2]))

    @property
    def experts(self) -> int:
        """Number of experts held."""
        return int(self.weights.num_local_experts)

    def batch(self, tokens: int, call: int) -> MoEBatch:
        """Return call number ``call`` with ``tokens`` tokens, its routing freshly drawn."""
        return self._with(
            routing.uniform(tokens, self.experts, self.top_k, seed=self.seed, call=call)
        )

    def check_batch(self, tokens: int) -> MoEBatch:
        """Return the call that is compared with the reference.

        Its first tokens are the same at any size, so one reference serves the whole sweep.
        """
        drawn = routing.uniform(
            max(self.sweep), self.experts, self.top_k, seed=self.seed, call=CHECK_CALL
        )
        return self._with(drawn.head(tokens))

    def _with(self, drawn: routing.Routing) -> MoEBatch:
        tokens = drawn.ids.shape[0]
        x = self.x[:tokens]
        work = accounting.count(
            self.gemms,
            drawn.rows_per_expert(self.experts),
            inputs=x.numel(),
            outputs=x.numel(),
        )
        return MoEBatch(x, drawn, work)


@dataclass(frozen=True)
class GemmLayer:
    """A grouped GEMM in which every expert gets the same number of rows.

    ``x`` is (E, R, K) for the largest R of the sweep.
    """

    name: str
    title: str
    weights: fp4lt.NVFP4Tensor
    sweep: tuple[int, ...]
    x: torch.Tensor
    kind: str = "gemm"

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of each expert's matrix."""
        return ((self.weights.shape[1], self.weights.shape[2]),)

    @property
    def experts(self) -> int:
        """Number of experts held."""
        return int(self.weights.shape[0])

    def batch(self, rows: int, call: int) -> GemmBatch:
        """Return a call with ``rows`` rows for each expert; all calls are alike."""
        del call
        x = self.x[:, :rows].reshape(self.experts * rows, -1)
        offs = torch.arange(1, self.experts + 1, dtype=torch.int32) * rows
        work = accounting.count(
            self.gemms,
            np.full(self.experts, rows),
            inputs=x.numel(),
            outputs=x.shape[0] * self.gemms[0][0],
        )
        return GemmBatch(x, offs, work)

    def check_batch(self, rows: int) -> GemmBatch:
        """Return the call that is compared with the reference."""
        return self.batch(rows, CHECK_CALL)


Layer = MoELayer | GemmLayer


def random_nvfp4(experts: int, rows: int, k: int, rng: np.random.Generator) -> fp4lt.NVFP4Tensor:
    """Make (experts, rows, k) random NVFP4 weights without quantizing anything.

    Codes are uniform over all 16, scales uniform over the e4m3 bytes from 64 to 448, and each
    expert's own global scale brings a dot product with unit-variance activations near 1.
    """
    words = rng.integers(0, 2**64, size=experts * rows * k // 16, dtype=np.uint64)
    codes = torch.from_numpy(words.view(np.uint8).reshape(experts, rows, k // 2))
    low, high = _SCALE_BYTES
    scale_bytes = rng.integers(low, high, size=(experts, rows, k // 16), dtype=np.uint8)
    scales = torch.from_numpy(scale_bytes).view(torch.float8_e4m3fn)
    # Root mean squares: 2.9 of the 16 codes, 233 of those scales.
    typical = 1.0 / (2.9 * 233.0 * math.sqrt(k))
    global_scale = torch.from_numpy(
        (typical * rng.uniform(0.5, 2.0, size=experts)).astype(np.float32)
    )
    return fp4lt.NVFP4Tensor.from_linear_scales(codes, scales, global_scale)


def _activations(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.bfloat16)


def stored_bytes(preset: presets.Preset, experts: int) -> int:
    """Bytes that a preset's NVFP4 weights take, tile padding aside."""
    elements = experts * sum(n * k for n, k in preset.gemms)
    return accounting.weight_bytes(elements, "nvfp4")


def from_preset(
    preset: presets.Preset,
    *,
    sweep: tuple[int, ...] | None = None,
    experts: int | None = None,
    seed: int = 0,
) -> Layer:
    """Make a random layer of a preset's shape.

    Parameters
    ----------
    preset : Preset
    sweep : tuple of int, optional
        Tokens (rows per expert for a GEMM) instead of the preset's own.
    experts : int, optional
        Keep fewer experts; the title says so.
    seed : int
        Of weights, activations and routings.
    """
    sizes = sweep or preset.sweep
    count = preset.experts if experts is None else min(experts, preset.experts)
    cut = "" if count == preset.experts else f", CUT to {count} of {preset.experts} experts"
    rng = np.random.default_rng([seed, 0x57])
    if preset.kind == "gemm":
        weights = random_nvfp4(count, preset.out_features, preset.in_features, rng)
        title = (
            f"{preset.name}: {preset.model}, grouped GEMM N {preset.out_features} "
            f"K {preset.in_features} E {count}{cut}"
        )
        shape = (count, max(sizes), preset.in_features)
        return GemmLayer(preset.name, title, weights, sizes, _activations(shape, seed))
    if preset.top_k > count:
        raise ValueError(
            f"{preset.name} routes to {preset.top_k} experts a token; --experts {count} is too few"
        )
    (rows, hidden), (_, intermediate) = preset.gemms
    w13 = random_nvfp4(count, rows, hidden, rng)
    w2 = random_nvfp4(count, hidden, intermediate, rng)
    moe_weights = fp4lt.MoEWeights(
        w13, w2, order="gate_up" if preset.gated else None, activation=preset.activation
    )
    title = (
        f"{preset.name}: {preset.model}, MoE block H {hidden} I {intermediate} (TP{preset.tp}) "
        f"E {count} k {preset.top_k}{cut}"
    )
    x = _activations((max(sizes), hidden), seed)
    return MoELayer(preset.name, title, moe_weights, preset.top_k, sizes, x, seed)


def checkpoint_top_k(path: Path) -> int:
    """Read ``num_experts_per_tok`` from the checkpoint's config.json."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{config}: {error}; give --top-k instead") from error
    value = data.get("num_experts_per_tok", data.get("text_config", {}).get("num_experts_per_tok"))
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{config} has no num_experts_per_tok; give --top-k")
    return value


def from_checkpoint(
    path: Path,
    layer: int | None,
    *,
    sweep: tuple[int, ...] = (1, 4, 24),
    top_k: int | None = None,
    seed: int = 0,
) -> MoELayer:
    """Load one MoE layer of a checkpoint; tokens and routing are random.

    ``layer`` may be None where the checkpoint has only one.
    """
    weights = fp4lt.load_moe(path, layer=layer)
    if not isinstance(weights.w13, fp4lt.NVFP4Tensor):
        raise ValueError(
            f"{path}: the experts are {weights.w13.dtype}; this benchmark counts NVFP4 bytes"
        )
    k = top_k or checkpoint_top_k(path)
    name = path.name if layer is None else f"{path.name}[{layer}]"
    which = "its only MoE layer" if layer is None else f"layer {layer}"
    title = (
        f"{name}: checkpoint {path}, {which}, MoE block H {weights.hidden_size} "
        f"I {weights.intermediate_size} E {weights.num_local_experts} k {k}"
    )
    x = _activations((max(sweep), int(weights.hidden_size)), seed)
    return MoELayer(name, title, weights, k, sweep, x, seed)
