# SPDX-License-Identifier: Apache-2.0
"""``python -m fp4lt doctor`` and ``python -m fp4lt verify``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from fp4lt import backends, doctor
from fp4lt.testing import verify

_DOCTOR = (
    "Say what was built, found and chosen, and why each backend refuses.  Exits with 1 if what was "
    "asked for is broken."
)
_VERIFY = (
    "Run every usable backend on this machine's devices against the exact oracle, on shapes that "
    "have been trouble elsewhere.  Exits with 1 if a check fails."
)


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
    return verify.main(options.backend, quick=options.quick, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
