# Finds nvcc and enables device code.  Sets FP4LT_HAS_CUDA and CMAKE_CUDA_ARCHITECTURES.
#
# nvcc's presence decides, nothing else: a toolkit that is there but broken, or an architecture that
# it does not know, is an error and never a quiet CPU-only build.
set(FP4LT_HAS_CUDA OFF)
if(FP4LT_CUDA STREQUAL "OFF")
  return()
endif()

set(nvcc "${CMAKE_CUDA_COMPILER}")
if(NOT nvcc)
  set(nvcc "$ENV{CUDACXX}")
endif()
if(NOT nvcc)
  find_package(CUDAToolkit QUIET)
  set(nvcc "${CUDAToolkit_NVCC_EXECUTABLE}")
endif()
if(NOT nvcc)
  if(FP4LT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FP4LT_CUDA=ON but nvcc was not found; set CUDACXX or CUDAToolkit_ROOT")
  endif()
  message(STATUS "fp4lt: no nvcc, building without CUDA")
  return()
endif()
set(CMAKE_CUDA_COMPILER "${nvcc}")

# Must be set before enable_language().  CMAKE_CUDA_ARCHITECTURES or CUDAARCHS override the list:
# sm_80 with PTX for everything that is not named, and the real targets that nvcc knows.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  execute_process(
    COMMAND "${nvcc}" --list-gpu-code
    OUTPUT_VARIABLE known
    COMMAND_ERROR_IS_FATAL ANY
  )
  set(CMAKE_CUDA_ARCHITECTURES 80)
  foreach(
    sm
    90
    100
    103
    110
    120
    121
  )
    if(known MATCHES "sm_${sm}")
      list(APPEND CMAKE_CUDA_ARCHITECTURES "${sm}a-real")
    endif()
  endforeach()
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(FP4LT_HAS_CUDA ON)
message(
  STATUS
  "fp4lt: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}"
)
