"""
Compiled core of fp4lt.  Private: use the fp4lt package.
"""

from __future__ import annotations

import enum
import typing

__all__: list[str] = [
    "BLOCK",
    "CHAIN_BLOCKS",
    "MAX_EXPERTS",
    "PREPARED_K",
    "RANGE",
    "ROW_BLOCK_BYTES",
    "TILE_BLOCKS",
    "TILE_ROWS",
    "Activation",
    "ActivationForm",
    "DType",
    "DenseView",
    "DeviceInfo",
    "ExpertParameter",
    "GateOrder",
    "GlobalScale",
    "Nvfp4View",
    "activate",
    "allow_openmp",
    "combine",
    "cpu_kernels",
    "cuda_activate",
    "cuda_architectures",
    "cuda_built_with",
    "cuda_combine",
    "cuda_dequantize",
    "cuda_device_count",
    "cuda_device_info",
    "cuda_driver",
    "cuda_fused_gemm",
    "cuda_plan_blocks",
    "cuda_prepare",
    "cuda_quantize",
    "cuda_read_memory",
    "cuda_route",
    "cuda_scale_rows",
    "cuda_tile_scales",
    "cuda_untile_scales",
    "dequantize",
    "expected_row_blocks",
    "fused_depth",
    "grouped_gemm",
    "max_row_blocks",
    "openmp_in_use",
    "pool_size",
    "quantize",
    "route",
    "row_block_size",
    "scale_offset",
    "scale_rows",
    "select_cpu_kernels",
    "selected_cpu_kernels",
    "tile_scales",
    "untile_scales",
]

class DType(enum.IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2

class GateOrder(enum.IntEnum):
    NONE = 0
    GATE_UP = 1
    UP_GATE = 2
    INTERLEAVED = 3

class DenseView:
    """
    K-contiguous matrices; strides in elements.
    """
    def __init__(
        self,
        *,
        data: typing.SupportsInt | typing.SupportsIndex,
        type: DType,
        expert_stride: typing.SupportsInt | typing.SupportsIndex,
        row_stride: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...

class ExpertParameter:
    """
    One number, or one for each expert.
    """
    def __init__(
        self,
        *,
        values: typing.SupportsInt | typing.SupportsIndex,
        stride: typing.SupportsInt | typing.SupportsIndex,
        shared: typing.SupportsFloat | typing.SupportsIndex,
    ) -> None: ...

class Nvfp4View:
    """
    NVFP4 matrices; strides in bytes and in floats.
    """
    def __init__(
        self,
        *,
        codes: typing.SupportsInt | typing.SupportsIndex,
        codes_expert_stride: typing.SupportsInt | typing.SupportsIndex,
        scales: typing.SupportsInt | typing.SupportsIndex,
        scales_expert_stride: typing.SupportsInt | typing.SupportsIndex,
        global_scale: typing.SupportsInt | typing.SupportsIndex,
        global_stride: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...

class GlobalScale(enum.IntEnum):
    PER_EXPERT = 0
    PER_ROW = 1
    GIVEN = 2

class Activation(enum.IntEnum):
    SWISH = 0
    GELU = 1
    GELU_TANH = 2
    RELU2 = 3

class DeviceInfo:
    """
    A CUDA device; sizes in bytes.
    """
    @property
    def l2_bytes(self) -> int: ...
    @property
    def major(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def minor(self) -> int: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def shared_bytes(self) -> int: ...

class ActivationForm(enum.IntEnum):
    FLOAT = 0
    HALF = 1
    ROUNDED = 2

def activate(
    *,
    h: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    n: typing.SupportsInt | typing.SupportsIndex,
    order: GateOrder,
    kind: Activation,
    row_expert: typing.SupportsInt | typing.SupportsIndex,
    alpha: ExpertParameter,
    beta: ExpertParameter,
    limit: ExpertParameter | None,
    out: typing.SupportsInt | typing.SupportsIndex,
    out_type: DType,
    threads: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Gate and up to the second GEMM's input.
    """

def allow_openmp(allowed: bool) -> None:
    """
    Use the OpenMP runtime where there is one; otherwise threads of our own.
    """

def combine(
    *,
    z: typing.SupportsInt | typing.SupportsIndex,
    slot_row: typing.SupportsInt | typing.SupportsIndex,
    weights: typing.SupportsInt | typing.SupportsIndex,
    tokens: typing.SupportsInt | typing.SupportsIndex,
    top_k: typing.SupportsInt | typing.SupportsIndex,
    hidden: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    out_type: DType,
    out_row_stride: typing.SupportsInt | typing.SupportsIndex,
    threads: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Weighted sum of each token's rows, in slot order.
    """

def cpu_kernels() -> list[str]:
    """
    Names of the CPU kernel tables that this processor runs, the best one last.
    """

def cuda_activate(
    *,
    h: typing.SupportsInt | typing.SupportsIndex,
    row_count: typing.SupportsInt | typing.SupportsIndex,
    row_expert: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    n: typing.SupportsInt | typing.SupportsIndex,
    order: GateOrder,
    kind: Activation,
    alpha: ExpertParameter,
    beta: ExpertParameter,
    limit: ExpertParameter | None,
    form: ActivationForm,
    type: DType,
    given: typing.SupportsInt | typing.SupportsIndex,
    given_stride: typing.SupportsInt | typing.SupportsIndex,
    global_out: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Gate and up to the second GEMM's input, in one of three forms.
    """

def cuda_architectures() -> str:
    """
    Architectures of the device code, separated by spaces.
    """

def cuda_built_with() -> str:
    """
    Version of the CUDA toolkit that compiled the device code; empty in a CPU-only build.
    """

def cuda_combine(
    *,
    z: typing.SupportsInt | typing.SupportsIndex,
    slot_row: typing.SupportsInt | typing.SupportsIndex,
    weights: typing.SupportsInt | typing.SupportsIndex,
    tokens: typing.SupportsInt | typing.SupportsIndex,
    top_k: typing.SupportsInt | typing.SupportsIndex,
    hidden: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    out_type: DType,
    out_row_stride: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Weighted sum of each token's rows, in slot order.
    """

def cuda_dequantize(
    *,
    x: Nvfp4View,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
    global_expert_stride: typing.SupportsInt | typing.SupportsIndex,
    global_row_stride: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    out_type: DType,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    dequantize on a CUDA device.
    """

def cuda_device_count() -> int:
    """
    Usable CUDA devices; 0 without a driver.
    """

def cuda_device_info(device: typing.SupportsInt | typing.SupportsIndex) -> DeviceInfo:
    """
    What a device is.
    """

def cuda_driver() -> str:
    """
    CUDA version of the loaded driver; empty where none is.
    """

def cuda_fused_gemm(
    *,
    n: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.SupportsInt | typing.SupportsIndex,
    block_count: typing.SupportsInt | typing.SupportsIndex,
    block_rows: typing.SupportsInt | typing.SupportsIndex,
    expected_blocks: typing.SupportsInt | typing.SupportsIndex,
    a: typing.SupportsInt | typing.SupportsIndex,
    a_type: DType,
    row_index: typing.SupportsInt | typing.SupportsIndex,
    a_global: typing.SupportsInt | typing.SupportsIndex,
    b: Nvfp4View,
    alpha: typing.SupportsInt | typing.SupportsIndex,
    alpha_expert_stride: typing.SupportsInt | typing.SupportsIndex,
    order: GateOrder,
    bias: typing.SupportsInt | typing.SupportsIndex,
    bias_expert_stride: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    out_type: DType,
    out_row_stride: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    The fused grouped GEMM over a work list.
    """

def cuda_plan_blocks(
    *,
    ends: typing.SupportsInt | typing.SupportsIndex,
    ends_are_64_bit: bool,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    block_rows: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.SupportsInt | typing.SupportsIndex,
    block_count: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    The work list of sorted rows.
    """

def cuda_prepare(
    *,
    x: Nvfp4View | DenseView,
    quantize: bool,
    rows: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
    source: typing.SupportsInt | typing.SupportsIndex,
    count: typing.SupportsInt | typing.SupportsIndex,
    given: typing.SupportsInt | typing.SupportsIndex,
    given_stride: typing.SupportsInt | typing.SupportsIndex,
    scale_index: typing.SupportsInt | typing.SupportsIndex,
    global_out: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Activations to the fused kernel's operand.
    """

def cuda_quantize(
    *,
    x: DenseView,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
    mode: GlobalScale,
    global_scale: typing.SupportsInt | typing.SupportsIndex,
    global_expert_stride: typing.SupportsInt | typing.SupportsIndex,
    global_row_stride: typing.SupportsInt | typing.SupportsIndex,
    codes: typing.SupportsInt | typing.SupportsIndex,
    scales: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    quantize on a CUDA device.
    """

def cuda_read_memory(
    *,
    device: typing.SupportsInt | typing.SupportsIndex,
    data: typing.SupportsInt | typing.SupportsIndex,
    bytes: typing.SupportsInt | typing.SupportsIndex,
    sink: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Launch a pure read of device memory: a bandwidth ceiling.
    """

def cuda_route(
    *,
    ids: typing.SupportsInt | typing.SupportsIndex,
    ids_are_64_bit: bool,
    tokens: typing.SupportsInt | typing.SupportsIndex,
    top_k: typing.SupportsInt | typing.SupportsIndex,
    expert_start: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
    block_rows: typing.SupportsInt | typing.SupportsIndex,
    row_count: typing.SupportsInt | typing.SupportsIndex,
    row_token: typing.SupportsInt | typing.SupportsIndex,
    row_expert: typing.SupportsInt | typing.SupportsIndex,
    slot_row: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.SupportsInt | typing.SupportsIndex,
    block_count: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Sort the slots by local expert and make the work list.
    """

def cuda_scale_rows(
    *,
    x: DenseView,
    weights: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    n: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Rows times the router weight, rounded to their own type.
    """

def cuda_tile_scales(
    *,
    linear: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.SupportsInt | typing.SupportsIndex,
    tiled: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    tile_scales on a CUDA device.
    """

def cuda_untile_scales(
    *,
    tiled: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.SupportsInt | typing.SupportsIndex,
    linear: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    untile_scales on a CUDA device.
    """

def dequantize(
    *,
    x: Nvfp4View,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
    global_expert_stride: typing.SupportsInt | typing.SupportsIndex,
    global_row_stride: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    out_type: DType,
    threads: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    The inverse of quantize.
    """

def expected_row_blocks(
    rows: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
    block_rows: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Entries that a work list is likely to have.
    """

def fused_depth(k: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    Most fp32 roundings a product can meet in the fused kernel's sum over k.
    """

def grouped_gemm(
    *,
    experts: typing.SupportsInt | typing.SupportsIndex,
    n: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
    ends: typing.SupportsInt | typing.SupportsIndex,
    a: Nvfp4View | DenseView,
    row_index: typing.SupportsInt | typing.SupportsIndex,
    b: Nvfp4View | DenseView,
    alpha: typing.SupportsInt | typing.SupportsIndex,
    alpha_expert_stride: typing.SupportsInt | typing.SupportsIndex,
    order: GateOrder,
    bias: typing.SupportsInt | typing.SupportsIndex,
    bias_expert_stride: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    out_type: DType,
    out_row_stride: typing.SupportsInt | typing.SupportsIndex,
    threads: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Grouped GEMM on the CPU; addresses of 0 stand for arguments left out.
    """

def max_row_blocks(
    rows: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
    block_rows: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Entries that a work list needs room for.
    """

def openmp_in_use() -> bool:
    """
    Whether work goes to the threads of the process's OpenMP runtime.
    """

def pool_size() -> int:
    """
    Helper threads of our own started so far.
    """

def quantize(
    *,
    x: DenseView,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
    mode: GlobalScale,
    global_scale: typing.SupportsInt | typing.SupportsIndex,
    global_expert_stride: typing.SupportsInt | typing.SupportsIndex,
    global_row_stride: typing.SupportsInt | typing.SupportsIndex,
    codes: typing.SupportsInt | typing.SupportsIndex,
    scales: typing.SupportsInt | typing.SupportsIndex,
    threads: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Round (experts, rows, k) values to NVFP4 on the CPU.
    """

def route(
    *,
    ids: typing.SupportsInt | typing.SupportsIndex,
    tokens: typing.SupportsInt | typing.SupportsIndex,
    top_k: typing.SupportsInt | typing.SupportsIndex,
    expert_start: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
    ends: typing.SupportsInt | typing.SupportsIndex,
    row_token: typing.SupportsInt | typing.SupportsIndex,
    row_expert: typing.SupportsInt | typing.SupportsIndex,
    slot_row: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Sort the slots by local expert; returns the rows.
    """

def row_block_size(
    rows: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Rows of a work list's entries.
    """

def scale_offset(
    row: typing.SupportsInt | typing.SupportsIndex,
    block: typing.SupportsInt | typing.SupportsIndex,
    padded: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Byte offset of one block's scale; padded: blocks of a padded row.
    """

def scale_rows(
    *,
    x: DenseView,
    weights: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    n: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    threads: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Rows times the router weight, rounded to their own type.
    """

def select_cpu_kernels(name: str) -> None:
    """
    Use the named table from now on; an empty name means the best one.
    """

def selected_cpu_kernels() -> str:
    """
    Name of the table in use.
    """

def tile_scales(
    *,
    linear: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.SupportsInt | typing.SupportsIndex,
    tiled: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Block scales from row-major order to 128x4 tiles.
    """

def untile_scales(
    *,
    tiled: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.SupportsInt | typing.SupportsIndex,
    linear: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Block scales from 128x4 tiles to row-major order.
    """

BLOCK: int = 16
CHAIN_BLOCKS: int = 16
MAX_EXPERTS: int = 1024
PREPARED_K: int = 256
RANGE: float = 2688.0
ROW_BLOCK_BYTES: int = 16
TILE_BLOCKS: int = 4
TILE_ROWS: int = 128
