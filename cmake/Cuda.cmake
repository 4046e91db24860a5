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
  # Not through find_package(): it takes an nvcc that fails for one that is not there.
  find_program(
    FP4LT_NVCC
    nvcc
    HINTS
    ENV CUDA_HOME
    ENV CUDA_PATH
    ENV CUDAToolkit_ROOT
    PATHS /usr/local/cuda
    PATH_SUFFIXES bin
  )
  if(FP4LT_NVCC)
    set(nvcc "${FP4LT_NVCC}")
  endif()
endif()
if(NOT nvcc)
  if(FP4LT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FP4LT_CUDA=ON but nvcc was not found; set CUDACXX or CUDAToolkit_ROOT")
  endif()
  message(STATUS "fp4lt: no nvcc, building without CUDA")
  return()
endif()
set(CMAKE_CUDA_COMPILER "${nvcc}")

execute_process(COMMAND "${nvcc}" --list-gpu-code OUTPUT_VARIABLE known RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(
    FATAL_ERROR
    "${nvcc} --list-gpu-code failed (${status}): the CUDA toolkit is broken; mend it, or build "
    "without device code with FP4LT_CUDA=OFF"
  )
endif()

# Must be set before enable_language().  CMAKE_CUDA_ARCHITECTURES or CUDAARCHS override the list:
# sm_80 with PTX for everything that is not named, and the real targets that nvcc knows.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
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
