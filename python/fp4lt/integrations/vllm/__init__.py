# SPDX-License-Identifier: Apache-2.0
"""vLLM: fp4lt's experts behind ``--moe-backend flashinfer_cutlass`` and ``cutlass``.

vLLM finds :func:`register` by the entry point ``fp4lt`` in the group ``vllm.general_plugins`` and
calls it in each of its processes.  docs/serving.md is the user's guide.
"""

from __future__ import annotations


def register() -> None:
    """Offer the experts to vLLM; see :mod:`fp4lt.integrations.vllm.plugin`."""
    from fp4lt.integrations.vllm.plugin import register_plugin

    register_plugin()
