# SPDX-License-Identifier: Apache-2.0
"""Replace the experts of a Hugging Face MoE model by fp4lt's, quantized to NVFP4.

``pip install 'fp4lt[transformers]'``, then ``python examples/patch_transformers.py``: a small
random Qwen3-MoE on the CPU, its patched experts against the unquantized ones in float64.  For
models whose experts are one module with ``gate_up_proj`` (E, 2I, H) and ``down_proj`` (E, H, I), as
transformers has them from version 5 on.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fp4lt
from fp4lt.problem import Recipe

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


class Experts(torch.nn.Module):
    """The experts of one layer: same arguments as the module that it replaces."""

    def __init__(self, weights: fp4lt.MoEWeights, recipe: Recipe) -> None:
        super().__init__()
        self.weights, self.recipe = weights, recipe

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Outputs (T, H) for hidden states (T, H) and their routing (T, k)."""
        return fp4lt.moe(
            hidden_states.detach(),
            self.weights,
            topk_weights=top_k_weights.detach(),
            topk_ids=top_k_index,
            recipe=self.recipe,
        )


def patch(model: torch.nn.Module, recipe: Recipe = "w4a16") -> int:
    """Quantize and replace the experts of every MoE layer, in place; how many there were."""
    found: list[tuple[torch.nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(getattr(child, "gate_up_proj", None), torch.nn.Parameter)
    ]
    for parent, name, child in found:
        if getattr(child, "is_transposed", False) or getattr(child, "has_bias", False):
            raise NotImplementedError(f"{type(child).__name__} is transposed or has biases")
        interleaved = not getattr(child, "is_concatenated", True)
        weights = fp4lt.MoEWeights(
            fp4lt.quantize(child.gate_up_proj.detach()),
            fp4lt.quantize(child.down_proj.detach()),
            order="interleaved" if interleaved else "gate_up",
            activation=ACTIVATIONS[child.config.hidden_act],  # type: ignore[arg-type]
        )
        setattr(parent, name, Experts(weights, recipe))
    return len(found)


def tolerance(
    experts: Any, weights: fp4lt.MoEWeights, x: torch.Tensor, chosen: torch.Tensor, r: torch.Tensor
) -> torch.Tensor:
    """How far outputs with `weights` can be from those of `experts`, (T, H) float64.

    The change of every weight is known, so its way through the block can be followed: each d bounds
    a change.  |silu'| < 1.1.  fp32 sums over K err by K 2^-23 of the terms' sizes at most; u and y
    are rounded to bf16, 2^-8, a little more for the products and sums around it.
    """
    W13, W2 = experts.gate_up_proj.double(), experts.down_proj.double()
    assert isinstance(weights.w13, fp4lt.NVFP4Tensor)
    assert isinstance(weights.w2, fp4lt.NVFP4Tensor)
    d_w13 = (weights.w13.dequantize().double() - W13).abs()
    d_w2 = (weights.w2.dequantize().double() - W2).abs()
    d_w13 += W13.shape[2] * 2.0**-23 * (W13.abs() + d_w13)
    d_w2 += W2.shape[2] * 2.0**-23 * (W2.abs() + d_w2)
    x, half = x.double(), 2.0**-8 + 2.0**-18
    gate, up = (x @ W13.mT).chunk(2, dim=-1)
    d_gate, d_up = (x.abs() @ d_w13.mT).chunk(2, dim=-1)
    silu = torch.nn.functional.silu(gate)
    u = silu * up
    d_u = 1.1 * d_gate * (up.abs() + d_up) + silu.abs() * d_up
    d_u += half * (u.abs() + d_u)
    z = u @ W2.mT
    d_z = u.abs() @ d_w2.mT + d_u @ (W2.abs() + d_w2).mT
    token = torch.arange(len(x))
    size, d_y = ((r.double().T.unsqueeze(-1) * t[chosen.T, token]).sum(0) for t in (z.abs(), d_z))
    limit: torch.Tensor = d_y + half * (size + d_y)
    return limit


def compare(name: str, y: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> None:
    """Print the error and its largest part of the bound; more than all of it ends the program."""
    difference = (y.double() - want).abs()
    part = float((difference / limit).max())
    print(f"{name}: relative error {float(difference.norm() / want.norm()):.1e}, ", end="")
    print(f"at most {part:.2f} of the bound")
    if not part <= 1:
        raise SystemExit("further off than rounding explains")


def main() -> None:
    """Patch a model, and hold one layer against what it was."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(vocab_size=256, num_hidden_layers=2, **sizes, **heads, **experts)
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    model.set_experts_implementation("eager")  # the others know no float64
    ids = torch.randint(0, config.vocab_size, (1, 12))

    before = copy.deepcopy(model.model.layers[0].mlp.experts).double()
    x = torch.randn(24, config.hidden_size).to(torch.bfloat16)
    with torch.no_grad():
        _, r, chosen = model.model.layers[0].mlp.gate(x)
        print(f"MoE layers patched: {patch(model)}")
        patched = model.model.layers[0].mlp.experts
        y = patched(x, chosen, r)

        def against(name: str, experts: Any) -> None:
            want = experts(x.double(), chosen, r.double())
            limit = tolerance(experts, patched.weights, x, chosen, r)
            compare(name, y, want, limit)

        against("the unquantized experts", before)
        before.gate_up_proj.copy_(patched.weights.w13.dequantize())
        before.down_proj.copy_(patched.weights.w2.dequantize())
        against("the same values in float64", before)
        logits = model(ids).logits
    print(f"logits {tuple(logits.shape)}, finite: {bool(torch.isfinite(logits).all())}")


if __name__ == "__main__":
    main()
