# SPDX-License-Identifier: Apache-2.0
"""SGLang: ``--moe-runner-backend fp4lt`` for NVFP4 experts.

SGLang finds :func:`register` by the entry point ``fp4lt`` in the group ``sglang.srt.plugins`` and
calls it in each of its processes.  docs/serving.md is the user's guide.
"""

from __future__ import annotations


def register() -> None:
    """Register the runner with SGLang; see :mod:`fp4lt.integrations.sglang.plugin`."""
    from fp4lt.integrations.sglang.plugin import register_plugin

    register_plugin()
