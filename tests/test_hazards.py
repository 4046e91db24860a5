# SPDX-License-Identifier: Apache-2.0
"""Known defects of versions of libcublasLt: which apply where, and what is done about each."""

from __future__ import annotations

import re

import pytest

from fp4lt import _C, _hazards


@pytest.mark.parametrize(
    ("version", "capability", "words"),
    [
        (120700, "10.0", "no FP4 matmul"),
        (120803, "12.0", "no FP4 matmul"),
        (120804, "10.0", "Tensor Memory"),
        (130100, "10.3", "Tensor Memory"),
        (130201, "11.0", "Tensor Memory"),
        (130203, "10.3", "multiple of 64"),
        (130600, "12.1", "one row"),
        (130700, "10.3", "768"),
        (130800, "10.0", "grouped products"),
        (130100, "9.0", "split-K"),
        (130100, "9.0", "leading dimension"),
        (130202, "12.1", "DGX Spark"),
        (130202, "12.0", "sibling"),
        (130501, "12.0", "RTX 50"),
    ],
)
def test_known_defects(version: int, capability: str, words: str) -> None:
    assert any(words in hazard.text for hazard in _hazards.hazards(version, capability))


@pytest.mark.parametrize(
    ("version", "capability", "words"),
    [
        (120804, "12.0", "FP4"),
        (130101, "9.0", "leading dimension"),
        (130300, "12.1", "DGX Spark"),
        (130300, "12.0", "sibling"),
        (130600, "12.0", "RTX 50"),
        (120805, "10.0", "Tensor Memory"),
        (130101, "10.0", "Tensor Memory"),
        (130202, "11.0", "Tensor Memory"),
        (130300, "10.3", "multiple of 64"),
        (130602, "10.3", "768"),
        (130601, "12.1", "one row"),
        (130602, "10.0", "grouped products"),
        (130800, "9.0", ""),
        (130800, "12.0", ""),
    ],
)
def test_cured_versions(version: int, capability: str, words: str) -> None:
    assert not any(words in hazard.text for hazard in _hazards.hazards(version, capability))


@pytest.mark.parametrize("hazard", _hazards.HAZARDS, ids=lambda h: f"{h.key}-{h.devices[0]}")
def test_every_range_begins_and_ends_where_it_says(hazard: _hazards.Hazard) -> None:
    capability = {"": "9.0", "10.": "10.0", "11.": "11.0", "12.": "12.0"}.get(
        hazard.devices[0], hazard.devices[0]
    )
    for first, fixed in hazard.versions:
        assert hazard in _hazards.hazards(first, capability)
        assert hazard in _hazards.hazards(fixed - 1, capability)
        assert hazard not in _hazards.hazards(fixed, capability)
        if first:
            assert hazard not in _hazards.hazards(first - 1, capability)
    assert hazard not in _hazards.hazards(hazard.versions[0][0], "8.0") or hazard.devices == ("",)


@pytest.mark.parametrize(
    ("version", "capability", "columns", "words"),
    [
        (120700, "10.0", (64,), "no FP4 matmul; install 12.8.0"),
        (120803, "12.0", (64,), "no FP4 matmul for this GPU; install 12.8.4"),
        (120804, "12.0", (8,), None),
        (
            130100,
            "10.0",
            (64,),
            "Tensor Memory.*install .*13.1.1.*FP4LT_ACCEPT_TENSOR_MEMORY=1.*risk",
        ),
        (130101, "10.0", (8,), None),
        (130101, "10.3", (128, 72), "multiple of 64; install 13.3.0"),
        (130101, "10.3", (128, 64), None),
        (130300, "10.3", (72,), None),
        (130602, "11.0", (8,), None),
    ],
)
def test_refusals(
    version: int, capability: str, columns: tuple[int, ...], words: str | None
) -> None:
    text = _hazards.refusal(version, capability, "fp4", columns, {})
    if words is None:
        assert text is None
    else:
        assert text is not None
        assert re.search(words, text), text


@pytest.mark.parametrize(
    ("version", "capability", "words"),
    [
        (120700, "10.0", None),
        (130100, "9.0", None),
        (130100, "10.0", "Tensor Memory.*install .*13.1.1.*FP4LT_ACCEPT_TENSOR_MEMORY=1.*risk"),
        (130201, "11.0", "Tensor Memory"),
        (130101, "10.3", None),
        (130501, "10.3", None),
        (130202, "12.0", None),
        (130300, "12.1", None),
    ],
)
def test_refusals_of_16_bit_products(version: int, capability: str, words: str | None) -> None:
    text = _hazards.refusal(version, capability, "16-bit", (72,), {})
    if words is None:
        assert text is None
    else:
        assert text is not None
        assert re.search(words, text), text
    accept = {_hazards.ACCEPT_TENSOR_MEMORY: "1"}
    assert _hazards.refusal(version, capability, "16-bit", (72,), accept) is None


def test_16_bit_products_are_refused_on_dgx_spark_and_fp4_ones_are_not() -> None:
    text = _hazards.refusal(130202, "12.1", "16-bit", (), {_hazards.ACCEPT_TENSOR_MEMORY: "1"})
    assert text is not None
    assert "DGX Spark; install 13.3.0" in text
    assert _hazards.refusal(130202, "12.1", "fp4", (64,), {}) is None


def test_the_tensor_memory_refusal_can_be_taken_back_and_no_other() -> None:
    accept = {_hazards.ACCEPT_TENSOR_MEMORY: "1"}
    assert _hazards.refusal(130100, "10.0", "fp4", (64,), accept) is None
    assert _hazards.refusal(130100, "10.0", "fp4", (64,), {_hazards.ACCEPT_TENSOR_MEMORY: "0"})
    assert _hazards.refusal(120700, "10.0", "fp4", (64,), accept)
    assert _hazards.refusal(130100, "10.3", "fp4", (8,), accept)


@pytest.mark.parametrize(
    ("version", "capability", "streams"),
    [
        (130100, "10.0", 1),
        (130201, "11.0", 1),
        (130100, "9.0", _C.MAX_STREAMS),
        (130100, "12.0", _C.MAX_STREAMS),
        (130101, "10.0", _C.MAX_STREAMS),
    ],
)
def test_products_that_can_spoil_each_other_share_one_stream(
    version: int, capability: str, streams: int
) -> None:
    assert _hazards.most_streams(version, capability) == streams


def flags(filters: _C.AlgorithmFilters) -> tuple[bool, ...]:
    return (
        filters.drop_768_auto,
        filters.drop_uneven_split_k,
        filters.no_query_in_capture,
        filters.refuses_one_row,
        filters.reads_alpha_early,
    )


@pytest.mark.parametrize(
    ("version", "capability", "want"),
    [
        (130100, "9.0", (False, True, False, False, False)),
        (130800, "9.0", (False, False, False, False, False)),
        (130501, "10.3", (True, True, True, True, True)),
        (130602, "10.3", (False, True, False, False, False)),
        (130700, "10.3", (True, True, False, False, False)),
        (130501, "12.0", (False, False, True, True, True)),
        (130800, "10.7", (False, False, False, False, False)),
    ],
)
def test_filters(version: int, capability: str, want: tuple[bool, ...]) -> None:
    assert flags(_hazards.filters(version, capability)) == want


def test_every_action_has_its_place() -> None:
    """What is refused is refused by `refusal` or in a capture; what is dropped, by a filter."""
    actions = {hazard.key: hazard.action for hazard in _hazards.HAZARDS}
    assert {key for key, action in actions.items() if action == "drop"} == {
        "stages_768_auto",
        "uneven_split_k",
    }
    assert {key for key, action in actions.items() if action == "refuse"} == {
        "no_fp4",
        "tensor_memory",
        "ragged_64",
        "spark_16_bit",
        "query_in_capture",
    }
