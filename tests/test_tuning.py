# SPDX-License-Identifier: Apache-2.0
"""The file of tuned algorithms, and tuning on a GPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4lt
from fp4lt import _C, _algorithms, tuning
from fp4lt.__main__ import main
from fp4lt._algorithms import Tuned
from fp4lt.backends import looped
from fp4lt.errors import UnsupportedError
from fp4lt.testing import bounds, cases


def entry(seed: int) -> Tuned:
    return Tuned(bytes((seed + i) % 256 for i in range(64)), 1.5 * seed, f"algorithm {seed}")


def test_where_the_file_is(tmp_path: Path) -> None:
    assert _algorithms.path({"FP4LT_ALGORITHMS": "/x/y.json"}) == Path("/x/y.json")
    assert _algorithms.path({"FP4LT_ALGORITHMS": ""}) is None
    assert _algorithms.path({"XDG_CACHE_HOME": "/c"}) == Path("/c/fp4lt/algorithms.json")
    assert _algorithms.path({"HOME": "/h"}) == Path("/h/.cache/fp4lt/algorithms.json")
    assert _algorithms.load(None) == {}
    assert _algorithms.load(tmp_path / "none.json") == {}


def test_what_is_stored_comes_back_and_new_entries_replace_old(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b.json"
    _algorithms.store(file, {"one": entry(1), "two": entry(2)})
    _algorithms.store(file, {"two": entry(3)})
    assert _algorithms.load(file) == {"one": entry(1), "two": entry(3)}
    assert sorted(p.name for p in file.parent.iterdir()) == ["b.json", "b.json.lock"]


def test_keys_tell_devices_versions_products_and_buckets_apart() -> None:
    keys = {
        _algorithms.key(device, version, product, bucket)
        for device in ("H200 9.0", "B200 10.0")
        for version in (130100, 130101)
        for product in ("dense bf16", "codes e2m1")
        for bucket in (16, 64)
    }
    assert len(keys) == 16


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1, 2]",
        '{"entries": 3}',
        '{"schema_version": 0, "entries": {}}',
        '{"schema_version": "99", "entries": {}}',
        "[" * 100_000,
        "\x00\x01 not json",
        '{"some": "other file"}',
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_replaced(tmp_path: Path, content: str) -> None:
    file = tmp_path / "algorithms.json"
    file.write_text(content)
    with pytest.warns(UserWarning, match=r"algorithms\.json is ignored: .*fp4lt tune"):
        assert _algorithms.load(file) == {}
    with pytest.warns(UserWarning, match="ignored"):
        _algorithms.store(file, {"one": entry(1)})
    assert _algorithms.load(file) == {"one": entry(1)}


def test_a_file_of_a_newer_version_is_ignored_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "algorithms.json"
    content = '{"schema_version": 99, "entries": {"kept": 1}}'
    file.write_text(content)
    with pytest.warns(UserWarning, match=r"newer fp4lt; set FP4LT_ALGORITHMS to another file"):
        assert _algorithms.load(file) == {}
    with pytest.raises(UnsupportedError, match=r"schema version 99, this fp4lt writes 1.*another"):
        _algorithms.store(file, {"one": entry(1)})
    assert file.read_text() == content


def test_a_user_without_a_name_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    assert _algorithms.path({}) is None
    assert _algorithms.path({"HOME": ""}) is None
    assert _algorithms.path({"XDG_CACHE_HOME": "/c"}) == Path("/c/fp4lt/algorithms.json")


def test_others_may_read_the_file_if_the_umask_lets_them(tmp_path: Path) -> None:
    file = tmp_path / "algorithms.json"
    old = os.umask(0o022)
    try:
        _algorithms.store(file, {"one": entry(1)})
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        file.chmod(0o664)
        _algorithms.store(file, {"two": entry(2)})
        assert stat.S_IMODE(file.stat().st_mode) == 0o664
    finally:
        os.umask(old)


def test_a_truncated_file_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "algorithms.json"
    _algorithms.store(file, {"one": entry(1), "two": entry(2)})
    text = file.read_text()
    for length in range(1, len(text) - 1, 7):
        file.write_text(text[:length])
        with pytest.warns(UserWarning, match="ignored"):
            assert _algorithms.load(file) == {}


@pytest.mark.parametrize(
    "damage",
    [
        {"algorithm": "AAAA"},
        {"algorithm": 7},
        {"algorithm": "!!"},
        {"check": 0},
        {"microseconds": "fast"},
        {"microseconds": 10**400},
        {"about": None, "check": None},
    ],
    ids=lambda damage: "-".join(damage),
)
def test_a_damaged_entry_is_ignored_alone(tmp_path: Path, damage: dict[str, Any]) -> None:
    file = tmp_path / "algorithms.json"
    _algorithms.store(file, {"one": entry(1), "two": entry(2)})
    document = json.loads(file.read_text())
    document["entries"]["one"] |= damage
    file.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="the entry 'one' is damaged"):
        assert _algorithms.load(file) == {"two": entry(2)}


def write_many(file: Path, first: int) -> None:
    for i in range(first, first + 20):
        _algorithms.store(file, {str(i): entry(i)})


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "algorithms.json"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(file, 100 * i)) for i in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(_algorithms.load(file)) == 40


def test_products_of_a_block() -> None:
    up, down = tuning.moe_products(7168, 2048, True, "nvfp4", "bfloat16")
    assert (up.n, up.k, down.n, down.k) == (4096, 7168, 7168, 2048)
    assert up.weights == _C.LoopedWeights.EXPANDED
    assert up.out == _C.DType.F32
    (plain, _) = tuning.moe_products(64, 32, False, "float16", "nvfp4")
    assert (plain.n, plain.weights, plain.type) == (32, _C.LoopedWeights.DENSE, _C.DType.F16)
    assert str(plain) == "dense f16 -> f32 N=32 K=64"


@pytest.mark.parametrize(
    ("weights", "activations", "out", "want"),
    [
        ("nvfp4", "nvfp4", "bfloat16", ["BF16", "F32"]),
        ("nvfp4", "nvfp4", "float16", ["F32"]),
        ("nvfp4", "nvfp4", "float32", ["F32"]),
        ("nvfp4", "bfloat16", "bfloat16", ["BF16"]),
        ("nvfp4", "float16", "bfloat16", ["F32"]),
        ("bfloat16", "nvfp4", "bfloat16", ["BF16"]),
        ("float16", "nvfp4", "float16", ["F16"]),
    ],
)
def test_products_of_grouped_mm(
    monkeypatch: pytest.MonkeyPatch, weights: str, activations: str, out: str, want: list[str]
) -> None:
    """Those that calls ask for: rows quantized with a scale each go by way of fp32 sums."""
    monkeypatch.setenv(looped.TEST_CAPABILITY, "9.0")
    found = tuning.grouped_products(256, 512, weights, activations, out)
    assert [product.out.name for product in found] == want
    assert {(product.n, product.k) for product in found} == {(256, 512)}


@pytest.mark.parametrize(
    ("n", "k", "kind"), [(64, 128, "CODES"), (64, 96, "EXPANDED"), (60, 128, "EXPANDED")]
)
def test_fp4_products_are_those_that_the_backend_takes(
    monkeypatch: pytest.MonkeyPatch, n: int, k: int, kind: str
) -> None:
    monkeypatch.setenv(looped.TEST_CAPABILITY, "10.0")
    assert tuning.product(n, k, "nvfp4", "nvfp4", "float32").weights.name == kind


def outcome_of(product: looped.Product) -> tuning.Outcome:
    return tuning.Outcome(f"{product} one", entry(1), 2.0, 3)


def test_each_product_is_kept_before_the_next_one_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "algorithms.json"
    monkeypatch.setenv("FP4LT_ALGORITHMS", str(file))
    first, second = tuning.moe_products(64, 128, True, "bfloat16", "bfloat16")

    def tune(products: list[looped.Product], rows: int) -> Iterator[tuning.Outcome]:
        assert rows == 1
        for product in products:
            if product == second:
                raise KeyboardInterrupt
            yield outcome_of(product)

    monkeypatch.setattr(tuning, "tune", tune)
    with pytest.raises(KeyboardInterrupt):
        tuning.main([first, second], 1)
    assert _algorithms.load(file) == {f"{first} one": entry(1)}
    assert "[1/2]" in capsys.readouterr().out


def test_a_file_of_a_newer_version_stops_the_command_before_it_tunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "algorithms.json"
    file.write_text('{"schema_version": 99, "entries": {}}')
    monkeypatch.setenv("FP4LT_ALGORITHMS", str(file))
    monkeypatch.setattr(tuning, "tune", lambda *_: pytest.fail("it tunes"))
    products = tuning.moe_products(64, 128, True, "bfloat16", "bfloat16")
    with pytest.raises(UnsupportedError, match="newer"):
        tuning.main(products, 1)


@pytest.mark.parametrize(
    ("built", "words"), [("", "no CUDA code"), ("13.0", "torch .* finds no CUDA device")]
)
def test_the_command_says_that_it_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], built: str, words: str
) -> None:
    monkeypatch.setattr(_C, "cuda_built_with", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "--moe", "64,128"]) == 1
    assert re.search(words, capsys.readouterr().err)
    with pytest.raises(UnsupportedError, match=words):
        next(tuning.tune([], 1))


def test_the_command_needs_something_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune"])
    assert "--moe or --shape" in capsys.readouterr().err


@pytest.mark.gpu
def test_tuning_is_kept_and_plans_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "algorithms.json"
    monkeypatch.setenv("FP4LT_ALGORITHMS", str(file))
    arguments = ["tune", "--shape", "256,512", "--rows", "40", "--weights", "bfloat16"]
    try:
        assert main(arguments) == 0
        assert f"kept in {file}" in capsys.readouterr().out
        kept = _algorithms.load(file)
        product = tuning.product(256, 512, "bfloat16", "bfloat16", "bfloat16")
        keys = {looped.algorithm_key(product, 0, bucket) for bucket in (1, 2, 4, 8, 16, 32, 64)}
        assert set(kept) == keys
        rng = cases.generator(1)
        w = cases.exact_matrix(rng, (3, 256, 512)).cuda()
        x = cases.exact_matrix(rng, (40, 512)).cuda()
        offs = torch.tensor([1, 1, 40])
        y = fp4lt.grouped_mm(x, w.mT, offs=offs, backend="dequant")
        want = torch.cat([x[:1] @ w[0].T, x[1:] @ w[2].T])
        bounds.assert_bitwise(y.cpu(), want.cpu(), signed_zeros=False)
    finally:
        looped.tuned.cache_clear()
        looped.compiled.cache_clear()
