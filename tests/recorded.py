# SPDX-License-Identifier: Apache-2.0
"""Reads what ``tests/recorder`` wrote: every question and matmul with all that was said of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

DESC: Final = {
    0: "COMPUTE_TYPE", 1: "SCALE_TYPE", 2: "POINTER_MODE", 3: "TRANSA", 4: "TRANSB", 5: "TRANSC",
    6: "FILL_MODE", 7: "EPILOGUE", 8: "BIAS_POINTER", 10: "BIAS_BATCH_STRIDE",
    11: "EPILOGUE_AUX_POINTER", 12: "EPILOGUE_AUX_LD", 13: "EPILOGUE_AUX_BATCH_STRIDE",
    14: "ALPHA_VECTOR_BATCH_STRIDE", 15: "SM_COUNT_TARGET", 17: "A_SCALE_POINTER",
    18: "B_SCALE_POINTER", 19: "C_SCALE_POINTER", 20: "D_SCALE_POINTER", 21: "AMAX_D_POINTER",
    22: "EPILOGUE_AUX_DATA_TYPE", 23: "EPILOGUE_AUX_SCALE_POINTER",
    24: "EPILOGUE_AUX_AMAX_POINTER", 25: "FAST_ACCUM", 26: "BIAS_DATA_TYPE", 31: "A_SCALE_MODE",
    32: "B_SCALE_MODE", 33: "C_SCALE_MODE", 34: "D_SCALE_MODE", 35: "EPILOGUE_AUX_SCALE_MODE",
    36: "D_OUT_SCALE_POINTER", 37: "D_OUT_SCALE_MODE", 38: "EMULATION_DESCRIPTOR",
    39: "ALPHA_BATCH_STRIDE", 40: "BETA_BATCH_STRIDE", 41: "BATCH_INVARIANCE_FLAGS",
}  # fmt: skip
LAYOUT: Final = {
    0: "TYPE", 1: "ORDER", 2: "ROWS", 3: "COLS", 4: "LD", 5: "BATCH_COUNT",
    6: "STRIDED_BATCH_OFFSET", 7: "PLANE_OFFSET", 8: "BATCH_MODE", 9: "ROWS_ARRAY",
    10: "COLS_ARRAY", 11: "LD_ARRAY", 12: "ROWS_COLS_ARRAY_INTEGER_WIDTH",
    13: "LD_ARRAY_INTEGER_WIDTH",
}  # fmt: skip
PREFERENCE: Final = {
    0: "SEARCH_MODE", 1: "MAX_WORKSPACE_BYTES", 3: "REDUCTION_SCHEME_MASK",
    5: "MIN_ALIGNMENT_A_BYTES", 6: "MIN_ALIGNMENT_B_BYTES", 7: "MIN_ALIGNMENT_C_BYTES",
    8: "MIN_ALIGNMENT_D_BYTES", 9: "MAX_WAVES_COUNT", 12: "IMPL_MASK",
    13: "GROUPED_AVERAGE_REDUCTION_DIM", 14: "GROUPED_DESC_D_AVERAGE_ROWS",
    15: "GROUPED_DESC_D_AVERAGE_COLS",
}  # fmt: skip

_NAMES: Final = {"MatmulDesc": DESC, "MatrixLayout": LAYOUT, "MatmulPreference": PREFERENCE}


def is_pointer(name: str) -> bool:
    """Whether an attribute's value is an address."""
    return name.endswith(("_POINTER", "_ARRAY", "_DESCRIPTOR"))


@dataclass
class Query:
    """A heuristic query, a check or a matmul, with its objects as they were at the call.

    Attributes
    ----------
    call : str
        "MatmulAlgoGetHeuristic", "MatmulAlgoCheck" or "Matmul" (or a ``...ForStream``).
    status : int
    said : dict
        ``"desc.TRANSA"``, ``"A.ROWS"``, ``"preference.MAX_WORKSPACE_BYTES"``, ... to integers:
        only what was given to a Create call or set.
    one_layout : bool
        C and D were described by the same object.
    event : dict
        The line itself.
    """

    call: str
    status: int
    said: dict[str, int]
    one_layout: bool
    event: dict[str, Any] = field(repr=False)

    def statement(self) -> dict[str, int | str]:
        """What was said, addresses as "set" or "null": equal on every run of a program."""
        return {
            name: ("set" if value else "null") if is_pointer(name) else value
            for name, value in self.said.items()
        }


@dataclass
class Recording:
    """A file's content.

    Attributes
    ----------
    about : dict
        What the first line says of machine and program, empty without such a line.
    events : list of dict
        Every recorded call in order.
    queries : list of Query
    """

    about: dict[str, Any]
    events: list[dict[str, Any]]
    queries: list[Query]

    def calls(self, name: str) -> list[Query]:
        """Queries of one call."""
        return [query for query in self.queries if query.call == name]


def _number(value: str) -> int:
    """Value of an attribute's bytes, little endian; only int32_t and int64_t can be negative."""
    return int.from_bytes(bytes.fromhex(value), "little", signed=True)


def _object(event: Mapping[str, Any]) -> dict[str, int]:
    """First attributes of a made object."""
    renamed = {
        "compute": "COMPUTE_TYPE", "scale": "SCALE_TYPE", "type": "TYPE", "groups": "BATCH_COUNT"
    }  # fmt: skip
    grouped = event["call"].startswith("Grouped")
    said = {}
    for key in ("compute", "scale", "type", "groups", "rows", "cols", "ld"):
        if key in event:
            said[renamed.get(key, key.upper() + ("_ARRAY" if grouped else ""))] = event[key]
    return said | ({"BATCH_MODE": 2} if grouped else {})


def _queries(events: list[dict[str, Any]]) -> Iterator[Query]:
    objects: dict[int, dict[str, int]] = {}
    for event in events:
        call = event["call"]
        if event.get("status", 0) != 0 and "desc" not in event:
            continue
        if "id" in event:
            objects[event["id"]] = _object(event)
        elif call.endswith("SetAttribute") and event["on"] in objects:
            names = _NAMES[call.removesuffix("SetAttribute")]
            name = names.get(event["attribute"], str(event["attribute"]))
            objects[event["on"]][name] = _number(event["value"])
        elif "desc" in event:
            parts = {
                "desc": "desc", "A": "a", "B": "b", "C": "c", "D": "d", "preference": "preference"
            }  # fmt: skip
            said = {
                f"{part}.{name}": value
                for part, key in parts.items()
                for name, value in objects.get(event.get(key, 0), {}).items()
            }
            yield Query(call, event["status"], said, event["c"] in (event["d"], 0), event)


def read(path: Path) -> Recording:
    """Read a recording; a first line with the key "about" is its description."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    about = lines.pop(0)["about"] if lines and "about" in lines[0] else {}
    return Recording(about, lines, list(_queries(lines)))


def differences(one: Query, other: Query) -> dict[str, tuple[int | str | None, int | str | None]]:
    """Attributes that the two say differently; None where one of them says nothing."""
    left, right = one.statement(), other.statement()
    return {
        name: (left.get(name), right.get(name))
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    }
