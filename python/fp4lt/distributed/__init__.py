# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism over torch.distributed: tokens go to their experts, results come back."""

from __future__ import annotations

from fp4lt.distributed.exchange import Exchange
from fp4lt.distributed.expert_parallel import ExpertParallelMoE, expert_range

__all__ = ["Exchange", "ExpertParallelMoE", "expert_range"]
