# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of fp4lt; run them as modules from the root of the repository."""
