# SPDX-License-Identifier: Apache-2.0
"""Other projects' MoE kernels, raced on the same weights, tokens and routing.

Third-party code is fetched at run time into a folder that git ignores; none of it is part of this
project.  docs/benchmarks.md, "Peers", says what is raced and how.
"""
