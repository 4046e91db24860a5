# CPU kernel tables beside the scalar one, each in files with flags of its own.  Which of them runs is
# decided at run time by what the processor has.
include(CheckCXXCompilerFlag)

function(fp4lt_add_table target name flags)
  string(TOUPPER ${name} upper)
  check_cxx_compiler_flag("${flags}" FP4LT_COMPILES_${upper})
  if(FP4LT_COMPILES_${upper})
    set(sources csrc/cpu/simd_${name}.cpp ${ARGN})
    target_sources(${target} PRIVATE ${sources})
    set_source_files_properties(${sources} PROPERTIES COMPILE_FLAGS "${flags}")
    target_compile_definitions(${target} PRIVATE FP4LT_HAVE_${upper}=1)
  endif()
endfunction()

function(fp4lt_add_simd target)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    fp4lt_add_table(${target} avx2 "-mavx2 -mfma -mf16c" csrc/cpu/simd_avx2_codec.cpp)
    set(avx512 "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni")
    fp4lt_add_table(${target} avx512 "${avx512}")
    fp4lt_add_table(${target} avx512_bf16 "${avx512} -mavx512bf16")
  endif()
endfunction()
