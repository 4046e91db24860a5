# SPDX-License-Identifier: Apache-2.0
"""Exact oracle, error bounds, cases and mutations: what every backend is judged by.

``oracle`` states the numbers in plain NumPy, ``bounds`` says how far a result may lie from them,
``cases`` makes inputs, and ``mutations`` breaks results so that tests can show they notice.
"""
