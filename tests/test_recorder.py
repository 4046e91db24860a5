# SPDX-License-Identifier: Apache-2.0
"""The recorder hears everything that a program says to cuBLASLt, and changes nothing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import lt_cases
import lt_driver as lt
import native_libraries
import pytest
import recorded
from lt_driver import Lt

if native_libraries.cxx() is None:
    pytest.skip("no C++ compiler on this machine", allow_module_level=True)

RECORDINGS = Path(__file__).parent / "data" / "recorded"


def in_child(code: str, tmp_path: Path, **environment: str) -> Path:
    """Run Python code with a recording of its own: the recorder finds its library only once."""
    out = tmp_path / "recording.jsonl"
    paths = {"RECORD_CUBLASLT_OUT": str(out), "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | paths | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


def shape(matrix: str, *values: int) -> dict[str, int]:
    names = (f"{matrix}.{name}" for name in ("TYPE", "ROWS", "COLS", "LD"))
    return dict(zip(names, values, strict=True))


def test_hears_a_whole_matmul_of_the_fake(tmp_path: Path) -> None:
    """Opened in the place of a library, as by FP4LT_CUBLASLT."""
    code = f"""
import lt_cases, lt_driver as lt
library = lt.Lt({str(native_libraries.recorder())!r})
assert library.version() == 130602
fake = lt.Lt({str(native_libraries.fake_cublaslt())!r})
matmul = lt_cases.small(library)
matmul.one_layout = False
assert matmul.run() == lt.OK, fake.reason()
assert lt_cases.result(matmul).any()
matmul.desc[lt.POINTER_MODE] = lt.i32(0)
matmul.data["alpha"] = lt_cases.scalar(0.5)
assert matmul.run() == lt.OK
matmul.desc[lt.TRANSA] = lt.i32(0)
assert matmul.run() == lt.UNSUPPORTED
grouped = lt_cases.grouped(library, (2, 0, 3))[0]
assert grouped.run() == lt.OK, fake.reason()
for kind in ("MatmulDesc", "MatrixLayout"):
    made = matmul.make()[kind != "MatmulDesc"]
    assert library.call(f"{{kind}}Destroy", made) == lt.OK
"""
    fake = str(native_libraries.fake_cublaslt())
    recording = recorded.read(in_child(code, tmp_path, RECORD_CUBLASLT_REAL=fake))
    assert [(q.call, q.status) for q in recording.queries] == [
        ("MatmulAlgoGetHeuristic", 0),
        ("Matmul", 0),
        ("MatmulAlgoGetHeuristic", 0),
        ("Matmul", 0),
        ("MatmulAlgoGetHeuristic", 15),
        ("MatmulAlgoGetHeuristic", 0),
        ("Matmul", 0),
    ]
    first, run, host, host_run, refused, grouped, _ = recording.queries
    assert first.statement() == {
        "desc.COMPUTE_TYPE": 68,
        "desc.SCALE_TYPE": 0,
        "desc.TRANSA": 1,
        "desc.TRANSB": 0,
        "desc.POINTER_MODE": 1,
        "desc.A_SCALE_MODE": 1,
        "desc.B_SCALE_MODE": 1,
        "desc.A_SCALE_POINTER": "set",
        "desc.B_SCALE_POINTER": "set",
        **shape("A", 33, 96, 136, 96),
        **shape("B", 33, 96, 3, 96),
        **shape("C", 14, 136, 3, 136),
        **shape("D", 14, 136, 3, 136),
        "preference.MAX_WORKSPACE_BYTES": lt_cases.WORKSPACE,
        **{f"preference.MIN_ALIGNMENT_{x}_BYTES": 16 for x in "ABCD"},
    }
    assert not first.one_layout
    assert first.event["requested"] == 8
    assert [r["workspace"] for r in first.event["results"]] == [65536, 65536, 0]
    assert run.event["algo"] == first.event["results"][0]["algo"]
    assert run.event["workspace_size"] == lt_cases.WORKSPACE
    assert all(run.event["pointers"][name] for name in ("alpha", "beta", "a", "b", "c", "d"))
    assert "alpha" not in run.event
    assert (host_run.event["alpha"], host_run.event["beta"]) == (0.5, 0.0)
    assert recorded.differences(first, host) == {"desc.POINTER_MODE": (1, 0)}
    assert recorded.differences(host, refused) == {"desc.TRANSA": (1, 0)}
    said = grouped.statement()
    assert said["A.BATCH_COUNT"] == 3
    assert said["D.COLS_ARRAY"] == "set"
    assert said["desc.ALPHA_BATCH_STRIDE"] == 1
    assert said["preference.GROUPED_DESC_D_AVERAGE_COLS"] == 2
    assert grouped.one_layout
    destroyed = [e["on"] for e in recording.events if e["call"].endswith("Destroy")]
    assert len(set(destroyed)) == 2
    assert min(destroyed) > 0


def test_preloaded(tmp_path: Path) -> None:
    """A linked program is heard through LD_PRELOAD, whatever library it then gets."""
    program, source = tmp_path / "program", tmp_path / "program.cpp"
    source.write_text("""
extern "C" int cublasLtMatmulPreferenceCreate(void**);
extern "C" int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, unsigned long);
int main() {
  void* preference = nullptr;
  unsigned long size = 1 << 20;
  if (cublasLtMatmulPreferenceCreate(&preference) != 0) return 1;
  return cublasLtMatmulPreferenceSetAttribute(preference, 1, &size, 8);
}
""")
    fake = native_libraries.fake_cublaslt()
    link = [str(fake), f"-Wl,-rpath,{fake.parent}", "-o", str(program)]
    subprocess.run([str(native_libraries.cxx()), str(source), *link], check=True)
    out = tmp_path / "out.jsonl"
    environment = {"LD_PRELOAD": str(native_libraries.recorder()), "RECORD_CUBLASLT_OUT": str(out)}
    subprocess.run([str(program)], check=True, env=os.environ | environment)
    calls = [(e["call"], e["status"]) for e in recorded.read(out).events]
    assert calls == [("MatmulPreferenceCreate", 0), ("MatmulPreferenceSetAttribute", 0)]


def test_missing_calls_are_refused_and_told(tmp_path: Path) -> None:
    code = f"""
import ctypes, lt_driver as lt
library = lt.Lt({str(native_libraries.recorder())!r})
layout = ctypes.c_void_p()
assert library.call("GroupedMatrixLayoutCreate", ctypes.byref(layout), 33, 1, 0, 0, 0) == 15
"""
    old = str(native_libraries.fake_cublaslt(grouped=False))
    recording = recorded.read(in_child(code, tmp_path, RECORD_CUBLASLT_REAL=old))
    assert recording.events[0] == {"call": "missing", "name": "cublasLtGroupedMatrixLayoutCreate"}
    assert recording.events[1]["status"] == 15


@pytest.mark.parametrize("library", native_libraries.cublas_libraries() or [None], ids=str)
def test_around_the_real_library(library: Path | None, tmp_path: Path) -> None:
    """Descriptors of a real cuBLASLt are recorded and read back; no GPU is needed."""
    if library is None:
        pytest.skip("no libcublasLt here: install nvidia-cublas-cu12 or nvidia-cublas")
    code = f"""
import lt_cases, lt_driver as lt
library = lt.Lt({str(native_libraries.recorder())!r}, handle=False)
matmul = lt_cases.small(library)
desc, a, *_ = matmul.make()
for attribute, value in matmul.desc.items():
    assert library.get("MatmulDesc", desc, attribute, len(value)) == value
assert library.get("MatrixLayout", a, 2, 8) == lt.i64(96)
assert library.get("MatmulDesc", desc, 7, 4) == lt.i32(1)
assert library.get("MatmulDesc", desc, 6, 4) == lt.i32(2)
preference = library.made("MatmulPreferenceCreate")
assert library.get("MatmulPreference", preference, lt.ALIGN_A, 4) == lt.i32(256)
assert library.set("MatmulPreference", preference, 1, bytes(4)) == lt.INVALID
"""
    recording = recorded.read(in_child(code, tmp_path, RECORD_CUBLASLT_REAL=str(library)))
    statuses = {e["status"] for e in recording.events}
    assert statuses == {lt.OK, lt.INVALID}
    assert {"MatmulDescCreate", "MatrixLayoutCreate", "MatmulPreferenceCreate"} <= {
        e["call"] for e in recording.events
    }


def test_defaults_of_the_fake_are_the_real_ones(tmp_path: Path) -> None:
    """What nobody sets reads the same in the fake and in every real library here."""
    libraries = native_libraries.cublas_libraries()
    if not libraries:
        pytest.skip("no libcublasLt here: install nvidia-cublas-cu12 or nvidia-cublas")
    kinds = {
        "MatmulDesc": ((68, 0), recorded.DESC),
        "MatmulPreference": ((), recorded.PREFERENCE),
        "MatrixLayout": ((33, ctypes.c_uint64(64), ctypes.c_uint64(8), ctypes.c_int64(64)),
                         recorded.LAYOUT),
    }  # fmt: skip
    fake = Lt(native_libraries.fake_cublaslt())
    for path in libraries:
        real = Lt(path, handle=False)
        os.environ["FAKE_CUBLASLT_VERSION"] = str(real.version())
        try:
            for kind, (arguments, names) in kinds.items():
                objects = [x.made(f"{kind}Create", *arguments) for x in (real, fake)]
                for attribute, name in names.items():
                    size, needed, statuses = ctypes.c_size_t(0), ctypes.c_size_t(0), []
                    for x, made in zip((real, fake), objects, strict=True):
                        get = (made, attribute, None, size, ctypes.byref(needed))
                        statuses.append((x.call(f"{kind}GetAttribute", *get), needed.value))
                        assert x.call(f"{kind}GetAttribute", *get[:-1], None) == lt.INVALID
                    if name == "EMULATION_DESCRIPTOR" and real.version() < 130100:
                        continue  # before it was documented the number meant something else
                    assert statuses[0] == statuses[1], (path, kind, name)
                    if statuses[0][0] == lt.OK:
                        values = [
                            x.get(kind, made, attribute, needed.value)
                            for x, made in zip((real, fake), objects, strict=True)
                        ]
                        assert values[0] == values[1], (path, kind, name)
        finally:
            del os.environ["FAKE_CUBLASLT_VERSION"]


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.jsonl")) or [None], ids=str)
def test_recordings_are_read(path: Path | None) -> None:
    if path is None:
        pytest.skip("tools/record_torch.py has not been run on a GPU yet")
    recording = recorded.read(path)
    assert {"torch", "cublaslt", "device", "case"} <= recording.about.keys()
    assert recording.calls("MatmulAlgoGetHeuristic")
