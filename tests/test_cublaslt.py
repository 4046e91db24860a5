# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt without a GPU: what we declare, what the real library gives back, what it says no to."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cublaslt_files import ABI, function_names, real_library, stub

from fp4lt import _C, _library
from fp4lt.errors import ArgumentError, LibraryError

ROOT = Path(__file__).parent.parent
TYPES = _C.CudaDataType
OUTPUTS = (TYPES.R_16BF, TYPES.R_16F, TYPES.R_32F)


def description(**changes: Any) -> _C.MatmulDescription:
    given: dict[str, Any] = {
        "operand": TYPES.R_4F_E2M1,
        "out": TYPES.R_16BF,
        "m": 384,
        "n": 7,
        "k": 7168,
        "lda": 7200,
        "ldb": 7232,
        "ldd": 392,
        "alignment": 32,
        "workspace_bytes": 1 << 25,
    }
    return _C.MatmulDescription(**(given | changes))


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("operand", [TYPES.R_4F_E2M1, TYPES.R_16BF, TYPES.R_16F])
def test_every_attribute_is_read_back(operand: Any, out: Any) -> None:
    library = real_library()
    scaled = operand == TYPES.R_4F_E2M1
    if scaled and library.version < 120800:
        pytest.skip("this version has no FP4")
    found = _C.cublaslt_read_back(
        library, description(operand=operand, out=out), a_scales=0x1000, b_scales=0x2000
    )
    want = {
        "compute_type": 68,
        "scale_type": 0,
        "pointer_mode": 1,
        "trans_a": 1,
        "trans_b": 0,
        "epilogue": 1,
        "a_scale_pointer": 0x1000 if scaled else 0,
        "b_scale_pointer": 0x2000 if scaled else 0,
        "a_type": int(operand),
        "a_order": 0,
        "a_rows": 7168,
        "a_cols": 384,
        "a_ld": 7200,
        "b_type": int(operand),
        "b_order": 0,
        "b_rows": 7168,
        "b_cols": 7,
        "b_ld": 7232,
        "d_type": int(out),
        "d_order": 0,
        "d_rows": 384,
        "d_cols": 7,
        "d_ld": 392,
        "workspace_bytes": 1 << 25,
        "reduction_schemes": 2,
        "a_alignment": 32,
        "b_alignment": 32,
        "c_alignment": 32,
        "d_alignment": 32,
    }
    if library.version >= 120800:
        want |= {"a_scale_mode": int(scaled), "b_scale_mode": int(scaled)}
    assert found == want


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": 7184, "lda": 7200}, "multiples of 32"),
        ({"lda": 7184}, "multiples of 32"),
        ({"ldb": 7184}, "multiples of 32"),
        ({"m": 380}, "multiples of 8"),
        ({"ldd": 388}, "multiples of 8"),
        ({"out": TYPES.R_32F, "m": 382, "ldd": 384}, "multiples of 4"),
        ({"alignment": 8}, "multiples of 16 bytes"),
        ({"n": 0}, "empty"),
        ({"lda": 7136}, "leading dimension"),
        ({"lda": 1 << 32}, "less than 2 GiB"),
        ({"ldb": 1 << 32}, "less than 2 GiB"),
        ({"ldd": 1 << 30}, "less than 2 GiB"),
        ({"out": TYPES.R_32F, "ldd": 1 << 29}, "less than 2 GiB"),
        ({"operand": TYPES.R_16F, "lda": 1 << 30}, "less than 2 GiB"),
    ],
)
def test_what_the_documentation_rules_out_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    library = _C.CublasLt(str(stub(tmp_path, 130602, status=0)))
    with pytest.raises(ArgumentError, match=words):
        _C.cublaslt_read_back(library, description(**changes), a_scales=16, b_scales=16)


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"a_scales": 8, "b_scales": 16}, r"weights' scales .* 16 bytes .*\.clone\(\)"),
        ({"a_scales": 16, "b_scales": 24}, r"activations' scales .* 16 bytes"),
    ],
)
def test_misaligned_scales_are_refused(tmp_path: Path, scales: dict[str, int], words: str) -> None:
    library = _C.CublasLt(str(stub(tmp_path, 130602, status=0)))
    with pytest.raises(ArgumentError, match=words):
        _C.cublaslt_read_back(library, description(), **scales)


def test_the_longest_leading_dimensions_are_taken(tmp_path: Path) -> None:
    library = _C.CublasLt(str(stub(tmp_path, 130602, status=0)))
    longest = description(lda=(1 << 32) - 32, ldb=(1 << 32) - 32, ldd=(1 << 30) - 8)
    assert _C.cublaslt_read_back(library, longest, a_scales=16, b_scales=16)


def test_sixteen_bit_operands_may_be_ragged() -> None:
    ragged = description(operand=TYPES.R_16BF, m=3, k=16, lda=16, ldb=48, ldd=3, alignment=2)
    found = _C.cublaslt_read_back(real_library(), ragged, a_scales=0, b_scales=0)
    assert (found["a_cols"], found["b_ld"], found["d_ld"]) == (3, 48, 3)


def test_a_description_prints_all_that_is_asked() -> None:
    text = str(description())
    for word in ("384 x 7", "R_4F_E2M1", "R_16BF", "op A T, op B N", "lda 7200", "ldb 7232"):
        assert word in text
    for word in ("ldd 392", "DEVICE", "VEC16_UE4M3", "alignment A 32", "33554432 bytes"):
        assert word in text
    assert "VEC16" not in str(description(operand=TYPES.R_16BF))


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (1, "NOT_INITIALIZED"),
        (3, "ALLOC_FAILED"),
        (7, "INVALID_VALUE"),
        (8, "ARCH_MISMATCH"),
        (11, "MAPPING_ERROR"),
        (13, "EXECUTION_FAILED"),
        (14, "INTERNAL_ERROR"),
        (15, "NOT_SUPPORTED"),
        (16, "LICENSE_ERROR"),
    ],
)
def test_every_status_is_an_error_with_call_name_and_number(
    tmp_path: Path, status: int, name: str
) -> None:
    library = _C.CublasLt(str(stub(tmp_path, 130602)))
    library.check(0, "cublasLtMatmul")
    with pytest.raises(
        LibraryError, match=rf"^cublasLtMatmul failed with CUBLAS_STATUS_{name} \({status}\)"
    ):
        library.check(status, "cublasLtMatmul")
    with pytest.raises(LibraryError, match=r"an unknown status \(99\)"):
        library.check(99, "cublasLtMatmul")


def test_a_call_that_fails_names_itself(tmp_path: Path) -> None:
    library = _C.CublasLt(str(stub(tmp_path, 130602, status=3)))
    with pytest.raises(LibraryError, match=r"cublasLtMatmulDescCreate failed .*ALLOC_FAILED \(3\)"):
        _C.cublaslt_read_back(library, description(), a_scales=16, b_scales=16)


def test_path_version_and_absent_functions(tmp_path: Path) -> None:
    file = stub(tmp_path, 130602)
    library = _C.CublasLt(str(file))
    assert (library.path, library.version) == (str(file), 130602)
    assert "cublasLtGroupedMatrixLayoutCreate" in library.absent
    real = real_library()
    grouped = "cublasLtGroupedMatrixLayoutCreate" not in real.absent
    assert grouped == (real.version >= 130200)
    assert Path(real.path).exists()


def test_a_library_without_a_needed_function_is_refused(tmp_path: Path) -> None:
    file = stub(tmp_path, 130602, leave_out="cublasLtMatmulAlgoCheck")
    with pytest.raises(LibraryError, match=r"has no cublasLtMatmulAlgoCheck: it is another"):
        _C.CublasLt(str(file))
    with pytest.raises(LibraryError, match=r"does not load: .*\(found by me\)"):
        _library.open_candidate(_library.Candidate(str(tmp_path / "none.so"), "me"))


def test_needed_functions_are_all_looked_up() -> None:
    names = function_names()
    assert len(names) == len(set(names)) == 18
    assert {"cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic"} <= set(names)


NONE = {
    "drop_768_auto": False,
    "drop_uneven_split_k": False,
    "no_query_in_capture": False,
    "refuses_one_row": False,
    "reads_alpha_early": False,
}


@pytest.mark.parametrize(
    ("filters", "algorithm", "words"),
    [
        ({}, {"stages": 38, "splits": 5}, None),
        ({"drop_768_auto": True}, {"stages": 38}, "768xAUTO"),
        ({"drop_768_auto": True}, {"stages": 37}, None),
        ({"drop_uneven_split_k": True}, {"splits": 15, "k": 2048}, "unequal parts"),
        ({"drop_uneven_split_k": True}, {"splits": 13, "k": 6144}, "unequal parts"),
        ({"drop_uneven_split_k": True}, {"splits": 5, "k": 7168}, None),
        ({"drop_uneven_split_k": True}, {"splits": 4}, None),
        ({"drop_uneven_split_k": True}, {"splits": 1}, None),
        ({"drop_uneven_split_k": True}, {"splits": 15, "k": 2048, "id": 21}, None),
    ],
)
def test_algorithms_that_are_dropped(
    filters: dict[str, bool], algorithm: dict[str, int], words: str | None
) -> None:
    reason = _C.cublaslt_dropped(
        **({"id": 66, "splits": 1, "stages": 0, "k": 7168} | algorithm),
        filters=_C.AlgorithmFilters(**(NONE | filters)),
    )
    assert (reason is None) if words is None else (reason is not None and words in reason)


@pytest.mark.parametrize("name", NONE)
@pytest.mark.parametrize("changes", [{"n": 1}, {"m": 1}, {"n": 2}], ids=str)
def test_a_refused_product_of_one_row_says_what_to_install(
    name: str, changes: dict[str, int]
) -> None:
    filters = _C.AlgorithmFilters(**(NONE | {name: True}))
    text = _C.cublaslt_advice(description(**changes), filters)
    if name == "refuses_one_row" and 1 in changes.values():
        assert "one row or one out-feature: install libcublasLt 13.6.1 or later" in text
    else:
        assert text == ""


def headers() -> list[Path]:
    """cublasLt.h beside each library that may be used."""
    paths = [candidate.path for candidate in (*_library.mapped(), *_library.wheels())]
    found = _library.find()
    if found is not None:
        paths.append(found.path)
    folders = [Path(path).parent.parent / "include" for path in paths]
    return list(dict.fromkeys(f / "cublasLt.h" for f in folders if (f / "cublasLt.h").is_file()))


def cuda_include() -> Path | None:
    roots = [Path(os.environ.get("CUDA_HOME", "")), Path("/usr/local/cuda")]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        roots.append(Path(nvcc).resolve().parent.parent)
    folders = [root / "include" for root in roots]
    return next((f for f in folders if (f / "cuda_runtime_api.h").is_file()), None)


def test_declarations_are_those_of_the_real_header(tmp_path: Path) -> None:
    compiler, cuda = shutil.which("c++"), cuda_include()
    if not headers() or compiler is None or cuda is None:
        pytest.skip("needs cublasLt.h, CUDA's own headers and a C++ compiler")
    changed = tmp_path / "cublaslt"
    changed.mkdir()
    (changed / "abi.h").write_text(ABI.read_text().replace("kDescTransA = 3", "kDescTransA = 4"))
    for header in headers():

        def compile_with(ours: Path, header: Path = header) -> subprocess.CompletedProcess[str]:
            folders = [f"-I{folder}" for folder in (ours, ROOT / "csrc", header.parent, cuda)]
            command = [compiler, "-std=c++17", "-fsyntax-only", *folders]
            return subprocess.run(
                [*command, str(ROOT / "tests" / "cpp" / "abi_check.cpp")],
                capture_output=True,
                text=True,
                check=False,
            )

        result = compile_with(ROOT / "csrc")
        assert result.returncode == 0, f"{header}:\n{result.stderr}"
        assert "CUBLASLT_MATMUL_DESC_TRANSA" in compile_with(tmp_path).stderr
