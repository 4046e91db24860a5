# SPDX-License-Identifier: Apache-2.0
"""Constants of the NVFP4 format: e2m1 codes, one e4m3 scale for every 16 of them, one fp32 global.

``value = E2M1_VALUES[code] * scale * global_scale``.  The same constants stand in
``csrc/core/nvfp4.h`` for C++; a test holds the two against each other.
"""

from __future__ import annotations

from typing import Final

BLOCK: Final = 16
"""Neighbours along K that share one scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES: Final = (*_MAGNITUDES, *(-v for v in _MAGNITUDES))
"""Value of each 4-bit code; bit 3 is the sign."""

E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
RANGE: Final = E2M1_MAX * E4M3_MAX
"""Largest magnitude of code times scale: a tensor's derived global scale is ``amax / RANGE``."""

TILE_ROWS: Final = 128
"""Rows of one scale tile."""

TILE_BLOCKS: Final = 4
"""Blocks (columns of scales) of one scale tile."""
