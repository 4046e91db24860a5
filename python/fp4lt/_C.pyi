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
    "MAX_SHARERS",
    "MAX_STREAMS",
    "PREPARED_K",
    "RANGE",
    "ROW_BLOCK_BYTES",
    "TILE_BLOCKS",
    "TILE_ROWS",
    "Activation",
    "ActivationForm",
    "AlgorithmFilters",
    "CublasLt",
    "CudaDataType",
    "DType",
    "DenseView",
    "DeviceInfo",
    "ExpertParameter",
    "Finish",
    "GateOrder",
    "GlobalScale",
    "LoopedAlgorithm",
    "LoopedGemm",
    "LoopedWeights",
    "MatmulDescription",
    "Nvfp4View",
    "OperandRows",
    "RowForm",
    "activate",
    "allow_openmp",
    "can_wgmma",
    "combine",
    "compiler",
    "cpu_kernels",
    "cublaslt_advice",
    "cublaslt_dropped",
    "cublaslt_read_back",
    "cuda_activate",
    "cuda_architectures",
    "cuda_built_with",
    "cuda_clear_tiles",
    "cuda_combine",
    "cuda_dequantize",
    "cuda_device_count",
    "cuda_device_info",
    "cuda_driver",
    "cuda_expand",
    "cuda_finish_rows",
    "cuda_fused_gemm",
    "cuda_locate_rows",
    "cuda_plan_blocks",
    "cuda_prepare",
    "cuda_put_integers",
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
    "most_block_rows",
    "openmp_in_use",
    "packed_tiles",
    "pool_size",
    "quantize",
    "route",
    "row_block_size",
    "row_bucket",
    "scale_offset",
    "scale_rows",
    "scratch_bytes",
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

class RowForm(enum.IntEnum):
    PREPARED = 0
    PLAIN = 1
    CODES = 2
    IMAGE = 3

class OperandRows:
    """
    Where the rows of an operand go.
    """
    def __init__(
        self,
        *,
        form: RowForm,
        values: typing.SupportsInt | typing.SupportsIndex,
        width: typing.SupportsInt | typing.SupportsIndex,
        scales: typing.SupportsInt | typing.SupportsIndex,
        scale_row: typing.SupportsInt | typing.SupportsIndex,
        place: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...

class Finish:
    """
    Factors and biases that turn sums into results.
    """
    def __init__(
        self,
        *,
        a_global: typing.SupportsInt | typing.SupportsIndex = 0,
        row_index: typing.SupportsInt | typing.SupportsIndex = 0,
        b_global: typing.SupportsInt | typing.SupportsIndex = 0,
        b_stride: typing.SupportsInt | typing.SupportsIndex = 0,
        alpha: typing.SupportsInt | typing.SupportsIndex = 0,
        alpha_expert_stride: typing.SupportsInt | typing.SupportsIndex = 0,
        order: GateOrder,
        bias: typing.SupportsInt | typing.SupportsIndex = 0,
        bias_expert_stride: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...

class ActivationForm(enum.IntEnum):
    FLOAT = 0
    HALF = 1
    ROUNDED = 2

class CublasLt:
    """
    An opened libcublasLt.
    """
    def __init__(self, path: str) -> None:
        """
        Open the file, for good.
        """
    def check(self, status: typing.SupportsInt | typing.SupportsIndex, call: str) -> None:
        """
        Raise LibraryError unless the status is 0.
        """
    @property
    def absent(self) -> list[str]:
        """
        Newer functions that it does not have.
        """
    @property
    def path(self) -> str:
        """
        Where the loader found it.
        """
    @property
    def version(self) -> int:
        """
        major * 10000 + minor * 100 + patch.
        """

class CudaDataType(enum.IntEnum):
    R_32F = 0
    R_16F = 2
    R_16BF = 14
    R_4F_E2M1 = 33

class MatmulDescription:
    """
    D[m, n] = A^T B, column-major; see csrc/cublaslt/matmul.h.
    """
    def __init__(
        self,
        *,
        operand: CudaDataType,
        out: CudaDataType,
        m: typing.SupportsInt | typing.SupportsIndex,
        n: typing.SupportsInt | typing.SupportsIndex,
        k: typing.SupportsInt | typing.SupportsIndex,
        lda: typing.SupportsInt | typing.SupportsIndex,
        ldb: typing.SupportsInt | typing.SupportsIndex,
        ldd: typing.SupportsInt | typing.SupportsIndex,
        alignment: typing.SupportsInt | typing.SupportsIndex,
        workspace_bytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def __str__(self) -> str: ...

class AlgorithmFilters:
    """
    Defects that concern single algorithms.
    """
    def __init__(
        self,
        *,
        drop_768_auto: bool,
        drop_uneven_split_k: bool,
        no_query_in_capture: bool,
        refuses_one_row: bool,
        reads_alpha_early: bool,
    ) -> None: ...
    @property
    def drop_768_auto(self) -> bool: ...
    @property
    def drop_uneven_split_k(self) -> bool: ...
    @property
    def no_query_in_capture(self) -> bool: ...
    @property
    def reads_alpha_early(self) -> bool: ...
    @property
    def refuses_one_row(self) -> bool: ...

class LoopedWeights(enum.IntEnum):
    DENSE = 0
    EXPANDED = 1
    CODES = 2

class LoopedAlgorithm:
    """
    An algorithm that the library proposes.
    """
    def __str__(self) -> str: ...
    @property
    def data(self) -> bytes:
        """
        64 bytes, good for the same version of the library.
        """
    @property
    def id(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def tile(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...

class LoopedGemm:
    """
    One shape on one device; see csrc/cublaslt/looped.h.
    """
    def __init__(
        self,
        *,
        library: CublasLt,
        device: typing.SupportsInt | typing.SupportsIndex,
        n: typing.SupportsInt | typing.SupportsIndex,
        k: typing.SupportsInt | typing.SupportsIndex,
        weights: LoopedWeights,
        type: DType,
        out: DType,
        slice: typing.SupportsInt | typing.SupportsIndex,
        library_workspace: typing.SupportsInt | typing.SupportsIndex,
        filters: AlgorithmFilters,
    ) -> None: ...
    def add_to_graph(
        self,
        *,
        ends: typing.SupportsInt | typing.SupportsIndex,
        experts: typing.SupportsInt | typing.SupportsIndex,
        row_count: typing.SupportsInt | typing.SupportsIndex,
        weights: Nvfp4View | DenseView,
        rows: typing.SupportsInt | typing.SupportsIndex,
        row_stride: typing.SupportsInt | typing.SupportsIndex,
        row_scales: typing.SupportsInt | typing.SupportsIndex,
        alpha: typing.SupportsInt | typing.SupportsIndex,
        alpha_stride: typing.SupportsInt | typing.SupportsIndex,
        out: typing.SupportsInt | typing.SupportsIndex,
        out_row_stride: typing.SupportsInt | typing.SupportsIndex,
        workspace: typing.SupportsInt | typing.SupportsIndex,
        streams: typing.SupportsInt | typing.SupportsIndex,
        stream: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        Add the products to the graph that the stream is capturing.
        """
    def candidates(
        self,
        *,
        weights: Nvfp4View | DenseView,
        rows: typing.SupportsInt | typing.SupportsIndex,
        row_stride: typing.SupportsInt | typing.SupportsIndex,
        row_scales: typing.SupportsInt | typing.SupportsIndex,
        out: typing.SupportsInt | typing.SupportsIndex,
        out_row_stride: typing.SupportsInt | typing.SupportsIndex,
        row_count: typing.SupportsInt | typing.SupportsIndex,
        count: typing.SupportsInt | typing.SupportsIndex,
    ) -> list[LoopedAlgorithm]:
        """
        The library's proposals for a number of rows.
        """
    def graph_bytes(self, rows: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Bytes of workspace per stream of add_to_graph().
        """
    def pin(self, bucket: typing.SupportsInt | typing.SupportsIndex, data: bytes) -> None:
        """
        Use this algorithm for a bucket of rows.
        """
    def run(
        self,
        *,
        ends: typing.SupportsInt | typing.SupportsIndex,
        experts: typing.SupportsInt | typing.SupportsIndex,
        weights: Nvfp4View | DenseView,
        rows: typing.SupportsInt | typing.SupportsIndex,
        row_stride: typing.SupportsInt | typing.SupportsIndex,
        row_scales: typing.SupportsInt | typing.SupportsIndex,
        alpha: typing.SupportsInt | typing.SupportsIndex,
        alpha_stride: typing.SupportsInt | typing.SupportsIndex,
        out: typing.SupportsInt | typing.SupportsIndex,
        out_row_stride: typing.SupportsInt | typing.SupportsIndex,
        workspace: typing.SupportsInt | typing.SupportsIndex,
        streams: typing.SupportsInt | typing.SupportsIndex,
        threads: typing.SupportsInt | typing.SupportsIndex,
        stream: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        Enqueue one product per expert.
        """
    @property
    def stream_bytes(self) -> int:
        """
        Bytes of workspace per stream.
        """

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

def can_wgmma(
    device: typing.SupportsInt | typing.SupportsIndex,
    b: Nvfp4View,
    k: typing.SupportsInt | typing.SupportsIndex,
) -> bool:
    """
    Whether the wgmma form of the fused kernel can run a GEMM with these weights.
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

def compiler() -> str:
    """
    Name and version of the C++ compiler that built the module.
    """

def cpu_kernels() -> list[str]:
    """
    Names of the CPU kernel tables that this processor runs, the best one last.
    """

def cublaslt_advice(description: MatmulDescription, filters: AlgorithmFilters) -> str:
    """
    What to say of a product that the library refuses; may be empty.
    """

def cublaslt_dropped(
    *,
    id: typing.SupportsInt | typing.SupportsIndex,
    splits: typing.SupportsInt | typing.SupportsIndex,
    stages: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
    filters: AlgorithmFilters,
) -> str | None:
    """
    Why an algorithm is not used, or None.
    """

def cublaslt_read_back(
    library: CublasLt,
    description: MatmulDescription,
    *,
    a_scales: typing.SupportsInt | typing.SupportsIndex,
    b_scales: typing.SupportsInt | typing.SupportsIndex,
) -> dict[str, int]:
    """
    What the library gives back of the objects made for a description.
    """

def cuda_activate(
    *,
    h: typing.SupportsInt | typing.SupportsIndex,
    h_row_stride: typing.SupportsInt | typing.SupportsIndex,
    finish: Finish,
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
    out: OperandRows,
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

def cuda_clear_tiles(
    *,
    ends: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    padded_blocks: typing.SupportsInt | typing.SupportsIndex,
    scales: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Zeros for the rows of padding of scale tiles.
    """

def cuda_combine(
    *,
    z: typing.SupportsInt | typing.SupportsIndex,
    finish: Finish,
    row_expert: typing.SupportsInt | typing.SupportsIndex,
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

def cuda_expand(
    *,
    codes: typing.SupportsInt | typing.SupportsIndex,
    scales: typing.SupportsInt | typing.SupportsIndex,
    row0: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    pad: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    out_type: DType,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Rows of NVFP4 as 16-bit products, without global scale.
    """

def cuda_finish_rows(
    *,
    c: typing.SupportsInt | typing.SupportsIndex,
    c_row_stride: typing.SupportsInt | typing.SupportsIndex,
    row_expert: typing.SupportsInt | typing.SupportsIndex,
    row_count: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    n: typing.SupportsInt | typing.SupportsIndex,
    finish: Finish,
    out: typing.SupportsInt | typing.SupportsIndex,
    out_type: DType,
    out_row_stride: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Sums to results.
    """

def cuda_fused_gemm(
    *,
    form: RowForm,
    n: typing.SupportsInt | typing.SupportsIndex,
    k: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.SupportsInt | typing.SupportsIndex,
    block_count: typing.SupportsInt | typing.SupportsIndex,
    block_rows: typing.SupportsInt | typing.SupportsIndex,
    expected_blocks: typing.SupportsInt | typing.SupportsIndex,
    list_is_older: bool,
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
    gated: RowForm | None,
    limit: ExpertParameter | None,
    shared_sums: typing.SupportsInt | typing.SupportsIndex,
    shared_flags: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    The fused grouped GEMM over a work list.
    """

def cuda_locate_rows(
    *,
    ends: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
    rows: typing.SupportsInt | typing.SupportsIndex,
    row_expert: typing.SupportsInt | typing.SupportsIndex,
    scale_row: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Each row's expert and place among the scale tiles.
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
    flags: typing.SupportsInt | typing.SupportsIndex,
    starts: typing.SupportsInt | typing.SupportsIndex,
    places: typing.SupportsInt | typing.SupportsIndex,
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
    out: OperandRows,
    starts: typing.SupportsInt | typing.SupportsIndex = 0,
    places: typing.SupportsInt | typing.SupportsIndex = 0,
    experts: typing.SupportsInt | typing.SupportsIndex = 0,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Activations to an operand.
    """

def cuda_put_integers(
    *,
    values: typing.SupportsInt | typing.SupportsIndex,
    count: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    device: typing.SupportsInt | typing.SupportsIndex,
    stream: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    int64 of host memory to int32 on the device, by value.
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
    ends: typing.SupportsInt | typing.SupportsIndex,
    row_place: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.SupportsInt | typing.SupportsIndex,
    block_count: typing.SupportsInt | typing.SupportsIndex,
    flags: typing.SupportsInt | typing.SupportsIndex,
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

def most_block_rows(device: typing.SupportsInt | typing.SupportsIndex, form: RowForm) -> int:
    """
    The most rows that an entry of a work list may have on the device.
    """

def openmp_in_use() -> bool:
    """
    Whether work goes to the threads of the process's OpenMP runtime.
    """

def packed_tiles(
    rows: typing.SupportsInt | typing.SupportsIndex,
    experts: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Tiles of 128 rows of a packed activation whose experts each begin one.
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
    most: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Rows of a work list's entries.
    """

def row_bucket(rows: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    Rows up to which one algorithm is asked for.
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

def scratch_bytes(
    device: typing.SupportsInt | typing.SupportsIndex,
    form: RowForm,
    k: typing.SupportsInt | typing.SupportsIndex,
    block_rows: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    Memory that a fused GEMM needs for tiles that are shared.
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
MAX_SHARERS: int = 512
MAX_STREAMS: int = 32
PREPARED_K: int = 256
RANGE: float = 2688.0
ROW_BLOCK_BYTES: int = 16
TILE_BLOCKS: int = 4
TILE_ROWS: int = 128
