# SPDX-License-Identifier: Apache-2.0
"""What is known to be wrong with versions of libcublasLt, and what is done about it.

From NVIDIA's release notes, and one from users' reports, as far as they concern what fp4lt asks of
the library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal, NamedTuple, TypeAlias

from fp4lt import _C
from fp4lt._library import version_name

ACCEPT_TENSOR_MEMORY: Final = "FP4LT_ACCEPT_TENSOR_MEMORY"
"""Environment variable that takes back the refusal of versions with the Tensor Memory defect: calls
then use one stream, and that no other kernel runs on the GPU is up to the user."""

Action: TypeAlias = Literal["refuse", "drop", "avoid", "warn"]
"""What is done: the product is refused; the algorithms concerned are not used; the way we call the
library keeps clear of it; or it is only said."""

Operands: TypeAlias = Literal["fp4", "16-bit", "any"]

_OPEN: Final = 1 << 30
_EVERY: Final = ("",)


class Hazard(NamedTuple):
    """A known defect of some versions.

    Attributes
    ----------
    key : str
        Short name.
    devices : tuple of str
        Beginnings of compute capabilities, ``"10."`` for all of 10.x.
    versions : tuple of (int, int)
        Ranges, first version with it and first one without.
    action : str
        What is done about it.
    text : str
        What goes wrong.
    cure : str
        What to install.
    operands : str
        Products of which operands it spoils: "fp4", "16-bit" or "any".
    """

    key: str
    devices: tuple[str, ...]
    versions: tuple[tuple[int, int], ...]
    action: Action
    text: str
    cure: str
    operands: Operands = "fp4"


HAZARDS: Final = (
    Hazard(
        "no_fp4",
        ("10.", "11."),
        ((0, 120800),),
        "refuse",
        "it has no FP4 matmul",
        "12.8.0 or later",
    ),
    Hazard(
        "no_fp4",
        ("12.",),
        ((0, 120804),),
        "refuse",
        "it has no FP4 matmul for this GPU",
        "12.8.4 or later",
    ),
    Hazard(
        "tensor_memory",
        ("10.", "11."),
        ((120800, 120805), (120900, 120902), (130000, 130101), (130200, 130202)),
        "refuse",
        "wrong results when another kernel that uses Tensor Memory runs at the same time",
        "12.8.5, 12.9.2, 13.1.1, 13.2.2, or 13.3.0 and later",
        operands="any",
    ),
    Hazard(
        "ragged_64",
        ("10.3",),
        ((120800, 130300),),
        "refuse",
        "wrong FP4 results where the out-features are no multiple of 64",
        "13.3.0 or later",
    ),
    Hazard(
        "stages_768_auto",
        ("10.3", "10.7"),
        ((130501, 130602), (130700, 130800)),
        "drop",
        "wrong FP4 results from algorithms with stages of 768xAUTO",
        "13.6.2, or 13.8.0 and later",
    ),
    Hazard(
        "spark_16_bit",
        ("12.1",),
        ((0, 130300),),
        "refuse",
        "illegal memory accesses in bf16 and fp16 products on DGX Spark",
        "13.3.0 or later",
        operands="16-bit",
    ),
    Hazard(
        "geforce_16_bit",
        ("12.0",),
        ((0, 130300),),
        "warn",
        "illegal memory accesses in bf16 and fp16 products are known of its sibling 12.1",
        "13.3.0 or later",
        operands="16-bit",
    ),
    Hazard(
        "large_stride",
        ("9.0", "10.", "11."),
        ((120603, 120805), (120900, 120902), (130000, 130101), (130200, 130202)),
        "avoid",
        "wrong results or illegal memory accesses where a leading dimension is 2 GiB or more",
        "12.8.5, 12.9.2, 13.1.1, 13.2.2, or 13.3.0 and later",
        operands="any",
    ),
    Hazard(
        "memory_errors",
        ("12.0",),
        ((130501, 130600),),
        "warn",
        "memory errors on RTX 50 laptops, from users' reports, which 13.4.0 did not have",
        "13.4.0, or a later version than 13.5.1",
        operands="any",
    ),
    Hazard(
        "uneven_split_k",
        ("9.0", "10.", "11."),
        ((120603, 130800),),
        "drop",
        "wrong results from split-K algorithms at some K",
        "13.8.0 or later",
        operands="any",
    ),
    Hazard(
        "early_alpha",
        ("10.", "12."),
        ((130100, 130601),),
        "avoid",
        "a device alpha may be read before the kernel that writes it has ended",
        "13.6.1 or later",
        operands="any",
    ),
    Hazard(
        "one_row",
        _EVERY,
        ((130501, 130601),),
        "warn",
        "products of one row may be refused",
        "13.6.1 or later",
        operands="any",
    ),
    Hazard(
        "query_in_capture",
        _EVERY,
        ((130501, 130601),),
        "refuse",
        "asking for algorithms breaks a graph capture",
        "13.6.1 or later",
        operands="any",
    ),
    Hazard(
        "grouped",
        ("10.", "11."),
        ((130700, _OPEN),),
        "warn",
        "grouped products may be wrong; no release is known to have the cure",
        "13.4 to 13.6 for grouped products",
    ),
)
"""``large_stride`` is avoided since such strides are refused, with every version.
``early_alpha`` is avoided since alpha is written before an event that the products wait for.
``query_in_capture`` refuses only a capture whose products have not run before."""


def hazards(version: int, capability: str) -> list[Hazard]:
    """Known defects of a version on a device of a compute capability such as ``"10.3"``."""
    return [
        hazard
        for hazard in HAZARDS
        if capability.startswith(hazard.devices)
        and any(first <= version < fixed for first, fixed in hazard.versions)
    ]


def refusal(
    version: int,
    capability: str,
    operands: Literal["fp4", "16-bit"],
    columns: tuple[int, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> str | None:
    """Why this version may not multiply such operands on the device, or None.

    Parameters
    ----------
    version : int
    capability : str
    operands : "fp4" or "16-bit"
    columns : tuple of int
        Out-features of each product.
    environ : mapping, optional
        Instead of the process's environment.
    """
    accepts = (os.environ if environ is None else environ).get(ACCEPT_TENSOR_MEMORY) == "1"
    for hazard in hazards(version, capability):
        if hazard.action != "refuse" or hazard.operands not in (operands, "any"):
            continue
        if hazard.key == "query_in_capture":  # of captures only: the loop refuses those
            continue
        if hazard.key == "ragged_64" and all(n % 64 == 0 for n in columns):
            continue
        if hazard.key == "tensor_memory" and accepts:
            continue
        text = (
            f"libcublasLt {version_name(version)} on compute capability {capability}: "
            f"{hazard.text}; install {hazard.cure}"
        )
        if hazard.key == "tensor_memory":
            text += (
                f" (or set {ACCEPT_TENSOR_MEMORY}=1 for one stream, slower; what else runs on the "
                "GPU can still spoil results, at your own risk)"
            )
        return text
    return None


@lru_cache(maxsize=64)
def most_streams(version: int, capability: str) -> int:
    """Streams that products may run on side by side: one where each can spoil the others.

    That holds whether the defect was accepted or not: what is accepted is the risk of other kernels
    on the GPU, which nothing here can see.
    """
    keys = {hazard.key for hazard in hazards(version, capability)}
    return 1 if "tensor_memory" in keys else _C.MAX_STREAMS


def filters(version: int, capability: str) -> _C.AlgorithmFilters:
    """What the defects of a version mean for the choice of algorithms."""
    keys = {hazard.key for hazard in hazards(version, capability)}
    return _C.AlgorithmFilters(
        drop_768_auto="stages_768_auto" in keys,
        drop_uneven_split_k="uneven_split_k" in keys,
        no_query_in_capture="query_in_capture" in keys,
        refuses_one_row="one_row" in keys,
        reads_alpha_early="early_alpha" in keys,
    )
