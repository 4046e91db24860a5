# SPDX-License-Identifier: Apache-2.0
"""What the host decides about a fused GEMM, on any machine."""

from __future__ import annotations

import pytest

from fp4lt import _C


@pytest.mark.parametrize(
    ("rows", "experts", "most", "want"),
    [
        (1, 256, 128, 8),
        (1024, 256, 128, 8),
        (1025, 256, 128, 16),
        (2048, 256, 128, 16),
        (2049, 256, 128, 32),
        (10**6, 8, 128, 128),
        (10**6, 8, 64, 64),
        # Compute capability 8.6, 8.9 and 12.x: 99 KB of shared memory hold 32 rows.
        (10**6, 8, 32, 32),
        (5, 1, 32, 16),
        (0, 1, 64, 8),
    ],
)
def test_rows_of_a_block(rows: int, experts: int, most: int, want: int) -> None:
    assert _C.row_block_size(rows=rows, experts=experts, most=most) == want


@pytest.mark.parametrize("block_rows", [8, 16, 32, 64, 128])
def test_a_work_list_has_room_for_any_routing(block_rows: int) -> None:
    for rows, experts in ((0, 3), (1, 1), (7, 256), (256, 256), (1000, 3), (4096, 40)):
        most = _C.max_row_blocks(rows=rows, experts=experts, block_rows=block_rows)
        # The worst: as many experts as can be have one row more than fills their blocks.
        full, left = 0, rows
        for _ in range(experts):
            if left > 0:
                full, left = full + 1, left - 1
        assert full + left // block_rows <= most
