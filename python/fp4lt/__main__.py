# SPDX-License-Identifier: Apache-2.0
"""``python -m fp4lt doctor``, ``verify`` and ``tune``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from fp4lt import backends, doctor, tuning
from fp4lt.backends.looped import Product
from fp4lt.errors import UnsupportedError
from fp4lt.testing import verify

_DOCTOR = (
    "Say what was built, found and chosen, and why each backend refuses.  Exits with 1 if what was "
    "asked for is broken."
)
_VERIFY = (
    "Run every usable backend on this machine's devices against the exact oracle, on shapes that "
    "have been trouble elsewhere.  Exits with 1 if a check fails."
)
_TUNE = (
    "Time the algorithms that cuBLASLt proposes for the products of a model on this GPU, and keep "
    "the best in a file that plans read.  Needs a CUDA device."
)


def _sizes(text: str) -> tuple[int, int]:
    first, second = (int(part) for part in text.split(","))
    return first, second


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = argparse.ArgumentParser(
        prog="python -m fp4lt", description="NVFP4 grouped GEMM for MoE experts."
    )
    commands = main.add_subparsers(dest="command", required=True)
    about = commands.add_parser("doctor", help="what is here and what works", description=_DOCTOR)
    check = commands.add_parser("verify", help="check the numbers", description=_VERIFY)
    names = [backend.name for backend in backends.BACKENDS]
    check.add_argument("--backend", choices=names, help="check this backend only")
    check.add_argument("--quick", action="store_true", help="the smaller and fewer checks")
    tune = commands.add_parser("tune", help="choose cuBLASLt's algorithms", description=_TUNE)
    tune.add_argument(
        "--moe", type=_sizes, action="append", default=[], metavar="HIDDEN,INTERMEDIATE",
        help="both products of a MoE block",
    )  # fmt: skip
    tune.add_argument(
        "--shape", type=_sizes, action="append", default=[], metavar="N,K",
        help="a grouped product, as grouped_mm has it",
    )  # fmt: skip
    tune.add_argument("--ungated", action="store_true", help="the MoE block has no gate")
    tune.add_argument("--rows", type=int, default=256, help="most rows of an expert (256)")
    types = ("nvfp4", "bfloat16", "float16")
    tune.add_argument("--weights", choices=types, default="nvfp4")
    tune.add_argument("--activations", choices=types, default="nvfp4", help="of NVFP4 weights")
    tune.add_argument(
        "--out", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="of --shape"
    )
    for command in (about, check):
        command.add_argument("--json", action="store_true", help="print one JSON document")
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = parser().parse_args(arguments)
    if options.command == "doctor":
        report = doctor.collect()
        print(json.dumps(report.to_json(), indent=2) if options.json else doctor.render(report))
        return 0 if report.ok else 1
    if options.command == "tune":
        return _tune(options)
    return verify.main(options.backend, quick=options.quick, as_json=options.json)


def _tune(options: argparse.Namespace) -> int:
    if not options.moe and not options.shape:
        parser().error("tune needs --moe or --shape")
    try:
        tuning.check_device()
        return tuning.main(_products(options), options.rows)
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 1


def _products(options: argparse.Namespace) -> list[Product]:
    types = (options.weights, options.activations)
    products = [
        product
        for hidden, inner in options.moe
        for product in tuning.moe_products(hidden, inner, not options.ungated, *types)
    ]
    for n, k in options.shape:
        products += tuning.grouped_products(n, k, *types, options.out)
    return products


if __name__ == "__main__":
    sys.exit(main())
