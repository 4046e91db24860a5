# SPDX-License-Identifier: Apache-2.0
"""Routings of the benchmark: drawn from a seed, or read from a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import layers, presets, routing

EVERY = ("uniform", "balanced", "zipf", "zipf:1.2", "one-hot")
JSON_LINES = "[3, 1]\n[0, 2]\n\n[1, 3]\n"


def test_routing_depends_on_seed_size_and_call_only() -> None:
    first = routing.uniform(9, 16, 4, seed=3, call=7)
    routing.uniform(9, 16, 4, seed=3, call=8)
    again = routing.uniform(9, 16, 4, seed=3, call=7)
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.weights, again.weights)
    for other in ({"seed": 4, "call": 7}, {"seed": 3, "call": 8}, {"seed": 3, "call": -7}):
        assert not torch.equal(first.ids, routing.uniform(9, 16, 4, **other).ids)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (8, 8), (256, 8)])
def test_routing_picks_distinct_experts(experts: int, top_k: int) -> None:
    drawn = routing.uniform(50, experts, top_k, seed=0, call=0)
    assert drawn.ids.shape == drawn.weights.shape == (50, top_k)
    assert int(drawn.ids.min()) >= 0
    assert int(drawn.ids.max()) < experts
    assert all(len(set(row)) == top_k for row in drawn.ids.tolist())
    assert bool((drawn.weights > 0).all())
    # k float32 roundings of numbers up to 1, twice.
    assert float((drawn.weights.double().sum(1) - 1).abs().max()) <= top_k * 2.0**-23
    assert drawn.rows_per_expert(experts).sum() == 50 * top_k


def test_routing_reaches_every_expert_in_every_slot() -> None:
    drawn = routing.uniform(400, 8, 2, seed=0, call=0)
    for slot in range(2):
        assert set(drawn.ids[:, slot].tolist()) == set(range(8))


def test_routing_needs_as_many_experts_as_it_picks() -> None:
    with pytest.raises(ValueError, match="the number of experts, got 9"):
        routing.uniform(1, 8, 9, seed=0, call=0)


@pytest.mark.parametrize("name", EVERY)
def test_every_router_is_seeded_and_picks_distinct_experts(name: str) -> None:
    router = routing.parse(name)
    drawn = router.draw(40, 16, 4, seed=1, call=-2)
    again = routing.parse(name).draw(40, 16, 4, seed=1, call=-2)
    assert torch.equal(drawn.ids, again.ids)
    assert torch.equal(drawn.weights, again.weights)
    assert not torch.equal(drawn.ids, router.draw(40, 16, 4, seed=1, call=0).ids)
    assert not torch.equal(drawn.ids, router.draw(40, 16, 4, seed=2, call=-2).ids)
    assert drawn.ids.dtype == torch.int64
    assert all(len(set(row)) == 4 for row in drawn.ids.tolist())
    assert drawn.rows_per_expert(16).sum() == 160


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(5, 16, 3), (64, 256, 8), (7, 3, 2)])
def test_balanced_rows_differ_by_one_at_most(tokens: int, experts: int, top_k: int) -> None:
    drawn = routing.parse("balanced").draw(tokens, experts, top_k, seed=0, call=3)
    for head in range(1, tokens + 1):
        rows = drawn.head(head).rows_per_expert(experts)
        assert rows.max() - rows.min() <= 1
    assert all(len(set(row)) == top_k for row in drawn.ids.tolist())


def test_one_hot_has_the_same_experts_for_all_tokens() -> None:
    drawn = routing.parse("one-hot").draw(9, 16, 2, seed=0, call=0)
    assert sorted(drawn.rows_per_expert(16)) == [0] * 14 + [9, 9]


def test_zipf_prefers_the_same_experts_from_call_to_call() -> None:
    router = routing.parse("zipf:1")
    rows = np.array([router.draw(500, 8, 1, seed=5, call=i).rows_per_expert(8) for i in range(8)])
    # 1 / (1 + 1/2 + ... + 1/8) of 4000 is 1472; 6 standard deviations are 183.
    total = np.sort(rows.sum(axis=0))[::-1]
    harmonic = sum(1 / r for r in range(1, 9))
    for rank, count in enumerate(total, 1):
        share = 1 / (rank * harmonic)
        assert abs(count - 4000 * share) <= 6 * (4000 * share * (1 - share)) ** 0.5
    assert len(set(rows.argmax(axis=1).tolist())) == 1


def test_zipf_names_its_exponent() -> None:
    assert routing.parse("zipf").name == "zipf:1"
    assert routing.parse("zipf:1.25").name == "zipf:1.25"


def test_a_lone_weight_is_below_one() -> None:
    weights = routing.uniform(100, 16, 1, seed=0, call=0).weights
    assert 0 < float(weights.min()) < float(weights.max()) < 1


@pytest.mark.parametrize(
    "text", ["Uniform", "uniform:1", "zipf:", "zipf:x", "zipf:-1", "zipf:nan", "trace", "trace:"]
)
def test_unknown_routings_are_refused(text: str) -> None:
    with pytest.raises(routing.RoutingError, match=r"no routing|exponent"):
        routing.parse(text)


def _trace(folder: Path, name: str = "trace.jsonl", text: str = JSON_LINES) -> routing.Router:
    path = folder / name
    path.write_text(text)
    return routing.parse(f"trace:{path}")


def test_a_trace_is_followed_and_begins_again(tmp_path: Path) -> None:
    router = _trace(tmp_path)

    def ids(call: int) -> list[list[int]]:
        found: list[list[int]] = router.draw(2, 4, 2, seed=9, call=call).ids.tolist()
        return found

    assert ids(0) == [[3, 1], [0, 2]]
    assert ids(1) == [[1, 3], [3, 1]]
    assert ids(2) == [[0, 2], [1, 3]]
    assert ids(3) == ids(0)
    assert ids(-1) == ids(2)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_npy_and_json_lines_are_the_same_trace(tmp_path: Path, dtype: type) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.array([[3, 1], [0, 2], [1, 3]], dtype=dtype))
    lines = _trace(tmp_path).draw(3, 4, 2, seed=0, call=0)
    binary = routing.parse(f"trace:{path}").draw(3, 4, 2, seed=0, call=0)
    assert torch.equal(lines.ids, binary.ids)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "need ids \\(T, k\\)"),
        ("[]\n", "need ids \\(T, k\\)"),
        ("[1, 2]\n[1, 2\n", "line 2: not JSON"),
        ("[1, 2]\n\n[1]\n", "line 3: 1 ids, the first token has 2"),
        ('{"ids": [1, 2]}\n', "line 1: need one token's ids like"),
        ("[1, 2.0]\n", "line 1: need one token's ids like"),
        ("[true, 2]\n", "line 1: need one token's ids like"),
        ("[1, 99999999999]\n", "line 1: need one token's ids like"),
        ("[0, 1]\n[-1, 2]\n", "token 1 has a negative id: \\[-1, 2\\]"),
        ("[0, 1]\n[2, 2]\n", "token 1 has an id twice: \\[2, 2\\]"),
    ],
)
def test_bad_trace_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(routing.RoutingError, match=message):
        _trace(tmp_path, text=text)


def test_unreadable_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(routing.RoutingError, match=r"none\.npy: No such file"):
        routing.parse(f"trace:{tmp_path / 'none.npy'}")
    (tmp_path / "text.npy").write_text(JSON_LINES)
    with pytest.raises(routing.RoutingError, match=r"not a \.npy array"):
        routing.parse(f"trace:{tmp_path / 'text.npy'}")
    np.save(tmp_path / "float.npy", np.ones((2, 2)))
    with pytest.raises(routing.RoutingError, match="must be integers, got float64"):
        routing.parse(f"trace:{tmp_path / 'float.npy'}")
    np.save(tmp_path / "flat.npy", np.arange(4))
    with pytest.raises(routing.RoutingError, match=r"shape \(4,\)"):
        routing.parse(f"trace:{tmp_path / 'flat.npy'}")


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "message"),
    [
        (1, 4, 1, "2 ids a token, the layer routes to 1"),
        (1, 3, 2, r"token 0 goes to \[3, 1\], and the layer has experts 0 to 2"),
        (4, 4, 2, "3 tokens, a call needs 4"),
    ],
)
def test_a_trace_must_fit_the_layer(
    tmp_path: Path, tokens: int, experts: int, top_k: int, message: str
) -> None:
    router = _trace(tmp_path)
    preset = presets.MoEPreset(
        name="tiny",
        model="none",
        hidden=32,
        intermediate=16,
        experts=experts,
        top_k=top_k,
        activation="silu",
        order="gate_up",
        sweep=(tokens,),
        source="made up",
        note="",
    )
    with pytest.raises(routing.RoutingError, match=message):
        layers.from_preset(preset, router=router)
