# SPDX-License-Identifier: Apache-2.0
"""Layers to time: random ones of a preset's shape, and real ones from a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

import fp4lt
from benchmarks import accounting, presets, routing

CHECK_CALL = 2**31  # a call number that no timed call reaches
CPU = torch.device("cpu")
MOST_COPIES = 16
MOST_KEPT = 64  # batches of a size
_SCALE_BYTES = (0x68, 0x7F)  # e4m3 64 to 448: block maxima within 3 octaves of the tensor's


@dataclass(frozen=True)
class MoEBatch:
    """One call of a MoE block.

    ``x`` (T, H) bf16, ``routing`` of its T tokens, ``rows`` (E,) of each local expert as the host
    knows them, ``copy`` the copy of the weights to use.
    """

    x: torch.Tensor
    routing: routing.Routing
    rows: tuple[int, ...]
    work: accounting.Work
    copy: int = 0


@dataclass(frozen=True)
class GemmBatch:
    """One call of a grouped GEMM: ``x`` (M, K) bf16, ``offs`` (E,) int32 END offsets."""

    x: torch.Tensor
    offs: torch.Tensor
    rows: tuple[int, ...]
    work: accounting.Work
    copy: int = 0


Batch = MoEBatch | GemmBatch


@dataclass(frozen=True)
class MoELayer:
    """A MoE block with its inputs for the largest T of the sweep.

    ``copies`` hold equal weights in different memory, so that calls can take turns.
    """

    name: str
    title: str
    copies: tuple[fp4lt.MoEWeights, ...]
    top_k: int
    sweep: tuple[int, ...]
    x: torch.Tensor
    seed: int
    router: routing.Router = routing.UNIFORM
    router_weight_on_input: bool = False
    kind: str = "moe"

    @property
    def weights(self) -> fp4lt.MoEWeights:
        """The first copy."""
        return self.copies[0]

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

    @property
    def device(self) -> torch.device:
        """Where weights and inputs are."""
        return self.x.device

    def _draw(self, tokens: int, call: int) -> routing.Routing:
        # Ids are global: with expert parallelism most of them belong to other devices.
        every = self.weights.num_experts
        assert every is not None
        return self.router.draw(tokens, every, self.top_k, seed=self.seed, call=call)

    @cached_property
    def _batches(self) -> dict[tuple[int, int], MoEBatch]:
        return {}

    def batch(self, tokens: int, call: int) -> MoEBatch:
        """Return call number ``call`` with ``tokens`` tokens and a routing of its own.

        The first calls are drawn once and kept: every contender asks for them again.
        """
        known = self._batches.get((tokens, call))
        if known is None:
            known = self._with(self._draw(tokens, call), call)
            if 0 <= call < MOST_KEPT:
                self._batches[tokens, call] = known
        return known

    @cached_property
    def _check_routing(self) -> routing.Routing:
        """The first draw whose first token has an expert here, or the last that was tried."""
        for call in range(CHECK_CALL, CHECK_CALL + 64):
            drawn = self._draw(max(self.sweep), call)
            if drawn.head(1).rows_per_expert(self.experts).any():
                break
        return drawn

    def check_batch(self, tokens: int) -> MoEBatch:
        """Return the call that is compared with the reference.

        Its first tokens are the same at any size, so one reference serves the whole sweep.
        """
        return self._with(self._check_routing.head(tokens), 0)

    def _with(self, drawn: routing.Routing, call: int) -> MoEBatch:
        tokens = drawn.ids.shape[0]
        x = self.x[:tokens]
        rows = drawn.rows_per_expert(self.experts)
        work = accounting.count(self.gemms, rows, inputs=x.numel(), outputs=x.numel())
        copy = call % len(self.copies)
        return MoEBatch(x, drawn.to(self.device), tuple(rows.tolist()), work, copy)


@dataclass(frozen=True)
class GemmLayer:
    """A grouped GEMM in which every expert gets the same number of rows.

    ``x`` is (E, R, K) for the largest R of the sweep; ``copies`` as in :class:`MoELayer`.
    """

    name: str
    title: str
    copies: tuple[fp4lt.NVFP4Tensor, ...]
    sweep: tuple[int, ...]
    x: torch.Tensor
    kind: str = "gemm"

    @property
    def weights(self) -> fp4lt.NVFP4Tensor:
        """The first copy."""
        return self.copies[0]

    @property
    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of each expert's matrix."""
        return ((self.weights.shape[1], self.weights.shape[2]),)

    @property
    def experts(self) -> int:
        """Number of experts held."""
        return int(self.weights.shape[0])

    @property
    def device(self) -> torch.device:
        """Where weights and inputs are."""
        return self.x.device

    def batch(self, rows: int, call: int) -> GemmBatch:
        """Return a call with ``rows`` rows for each expert; calls differ in the copy only."""
        x = self.x[:, :rows].reshape(self.experts * rows, -1)
        offs = torch.arange(1, self.experts + 1, dtype=torch.int32, device=self.device) * rows
        each = np.full(self.experts, rows)
        outputs = x.shape[0] * self.gemms[0][0]
        work = accounting.count(self.gemms, each, inputs=x.numel(), outputs=outputs)
        return GemmBatch(x, offs, tuple(each.tolist()), work, call % len(self.copies))

    def check_batch(self, rows: int) -> GemmBatch:
        """Return the call that is compared with the reference."""
        return self.batch(rows, 0)


Layer = MoELayer | GemmLayer


def random_nvfp4(
    experts: int, rows: int, k: int, seed: list[int], device: torch.device = CPU
) -> fp4lt.NVFP4Tensor:
    """Make (experts, rows, k) random NVFP4 weights without quantizing anything.

    Codes are uniform over all 16, scales uniform over the e4m3 bytes from 64 to 448, and each
    expert's own global scale brings a dot product with unit-variance activations near 1.
    """
    rng = np.random.default_rng(seed)
    low, high = _SCALE_BYTES
    # Root mean squares: 2.9 of the 16 codes, 233 of those scales.
    typical = 1.0 / (2.9 * 233.0 * math.sqrt(k))
    multipliers = (typical * rng.uniform(0.5, 2.0, size=experts)).astype(np.float32)
    global_scale = torch.from_numpy(multipliers).to(device)
    shape, blocks = (experts, rows, k // 2), (experts, rows, k // 16)
    if device.type == "cpu":  # NumPy's 64-bit words are several times faster than torch's bytes
        words = rng.integers(0, 2**64, size=experts * rows * k // 16, dtype=np.uint64)
        codes = torch.from_numpy(words.view(np.uint8).reshape(shape))
        scales = torch.from_numpy(rng.integers(low, high, size=blocks, dtype=np.uint8))
    else:
        generator = torch.Generator(device).manual_seed(int(rng.integers(2**31)))
        given = {"dtype": torch.uint8, "device": device, "generator": generator}
        codes = torch.randint(256, shape, **given)  # type: ignore[call-overload]
        scales = torch.randint(low, high, blocks, **given)  # type: ignore[call-overload]
    return fp4lt.NVFP4Tensor.from_linear_scales(codes, scales, global_scale)


def _activations(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
    return values.to(device, torch.bfloat16)


def stored_bytes(preset: presets.Preset, experts: int) -> int:
    """Bytes that a preset's NVFP4 weights take, tile padding aside."""
    elements = experts * sum(n * k for n, k in preset.gemms)
    return accounting.weight_bytes(elements, "nvfp4")


def copies_needed(layer: Layer, cold_bytes: int, budget: int) -> tuple[int, bool]:
    """How many copies make a call's weights unlikely to be in a cache from the calls before.

    The smallest call of a MoE block touches at least the experts of one token.  One call on each
    copy shall touch ``cold_bytes`` in all; False if that took more than 16 copies or ``budget``
    bytes, to which the number is limited.
    """
    elements = sum(n * k for n, k in layer.gemms)
    touched = min(layer.experts, layer.top_k) if isinstance(layer, MoELayer) else layer.experts
    wanted = math.ceil(cold_bytes / accounting.weight_bytes(touched * elements, "nvfp4"))
    stored = accounting.weight_bytes(layer.experts * elements, "nvfp4")
    count = max(1, min(wanted, MOST_COPIES, budget // stored))
    return count, count == wanted


def with_copies(layer: Layer, count: int) -> Layer:
    """Return the layer with ``count`` copies of its weights."""
    if isinstance(layer, GemmLayer):
        more = tuple(_clone(layer.weights) for _ in range(count - 1))
        return replace(layer, copies=(layer.weights, *more))
    first, (w13, w2) = layer.weights, layer.matrices
    others = (replace(first, w13=_clone(w13), w2=_clone(w2)) for _ in range(count - 1))
    return replace(layer, copies=(first, *others))


def _clone(t: fp4lt.NVFP4Tensor) -> fp4lt.NVFP4Tensor:
    return fp4lt.NVFP4Tensor(t.codes.clone(), t.scales.clone(), t.global_scale.clone())


def from_preset(
    preset: presets.Preset,
    *,
    sweep: tuple[int, ...] | None = None,
    experts: int | None = None,
    seed: int = 0,
    router: routing.Router = routing.UNIFORM,
    device: torch.device = CPU,
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
    router : Router
    device : torch.device

    Raises
    ------
    ValueError
        If the routing is impossible for this layer.
    """
    sizes = sweep or preset.sweep
    here = preset.local_experts
    count = here if experts is None else min(experts, here)
    cut = "" if count == here else f", CUT to {count} of {here} experts"
    if isinstance(preset, presets.GemmPreset):
        n, k = preset.gemms[0]
        weights = random_nvfp4(count, n, k, [seed, 0x57], device)
        title = f"{preset.name}: {preset.model}, grouped GEMM N {n} K {k} E {count}{cut}"
        x = _activations((count, max(sizes), k), seed, device)
        return GemmLayer(preset.name, title, (weights,), sizes, x)
    # A cut layer is a model with so many experts less; an EP rank's tokens route to all ranks'.
    every = count * preset.ep
    if preset.top_k > every:
        raise ValueError(
            f"{preset.name} routes to {preset.top_k} experts a token; --experts {count} is too few"
        )
    router.validate(max(sizes), every, preset.top_k)
    title = (
        f"{preset.name}: {preset.model}, MoE block H {preset.hidden} I {preset.intermediate} "
        f"(TP{preset.tp}) E {count}{f' of {every} (EP{preset.ep})' if preset.ep > 1 else ''} "
        f"k {preset.top_k} {preset.activation}, {router.name} routing{cut}"
    )
    return MoELayer(
        preset.name,
        title,
        (_random_moe(preset, count, every, seed, device),),
        preset.top_k,
        sizes,
        _activations((max(sizes), preset.hidden), seed, device),
        seed,
        router,
        preset.router_weight_on_input,
    )


def _random_moe(
    preset: presets.MoEPreset, count: int, every: int, seed: int, device: torch.device
) -> fp4lt.MoEWeights:
    (rows, hidden), (_, intermediate) = preset.gemms

    def bias(width: int, salt: int) -> torch.Tensor | None:
        return _activations((count, width), seed + salt, device) if preset.bias else None

    return fp4lt.MoEWeights(
        random_nvfp4(count, rows, hidden, [seed, 0x13], device),
        random_nvfp4(count, hidden, intermediate, [seed, 0x02], device),
        order=preset.order,
        activation=preset.activation,
        w13_bias=bias(rows, 0x13),
        w2_bias=bias(hidden, 0x02),
        swiglu_limit=preset.swiglu_limit,
        num_experts=every,
    )


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
    sweep: tuple[int, ...] = (1, 24),
    top_k: int | None = None,
    seed: int = 0,
    router: routing.Router = routing.UNIFORM,
    device: torch.device = CPU,
) -> MoELayer:
    """Load one MoE layer of a checkpoint; tokens are random.

    ``layer`` may be None where the checkpoint has only one.
    """
    weights = fp4lt.load_moe(path, layer=layer, device=device)
    if not isinstance(weights.w13, fp4lt.NVFP4Tensor):
        raise ValueError(
            f"{path}: the experts are {weights.w13.dtype}; this benchmark counts NVFP4 bytes"
        )
    k = top_k or checkpoint_top_k(path)
    router.validate(max(sweep), int(weights.num_local_experts), k)
    name = path.name if layer is None else f"{path.name}[{layer}]"
    which = "its only MoE layer" if layer is None else f"layer {layer}"
    title = (
        f"{name}: checkpoint {path}, {which}, MoE block H {weights.hidden_size} "
        f"I {weights.intermediate_size} E {weights.num_local_experts} k {k}, {router.name} routing"
    )
    x = _activations((max(sweep), int(weights.hidden_size)), seed, device)
    return MoELayer(name, title, (weights,), k, sweep, x, seed, router)
