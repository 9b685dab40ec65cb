# Finds a LibTorch and adds its location to CMAKE_PREFIX_PATH, then calls
# find_package(Torch). The first of these that exists wins:
#   1. REPRISE_TORCH (CMake variable or environment): a LibTorch directory
#   2. CMAKE_PREFIX_PATH, if it contains a TorchConfig.cmake
#   3. the LibTorch of the `torch` package of python3
#   4. the LibTorch of the system (Debian: libtorch-dev)
# Sets REPRISE_LIBTORCH_FROM to a description of the source.

set(REPRISE_TORCH "$ENV{REPRISE_TORCH}" CACHE PATH
    "LibTorch to build with; empty: CMAKE_PREFIX_PATH, python3's, the system's")

set(REPRISE_LIBTORCH_FROM "the system")
if(REPRISE_TORCH)
  list(PREPEND CMAKE_PREFIX_PATH "${REPRISE_TORCH}")
  set(REPRISE_LIBTORCH_FROM "REPRISE_TORCH")
elseif(Torch_DIR)
  set(REPRISE_LIBTORCH_FROM "Torch_DIR")
else()
  find_file(REPRISE_GIVEN_TORCH TorchConfig.cmake
            PATHS ${CMAKE_PREFIX_PATH} ENV CMAKE_PREFIX_PATH
            PATH_SUFFIXES share/cmake/Torch Torch lib/cmake/Torch
            NO_DEFAULT_PATH)
  if(REPRISE_GIVEN_TORCH)
    set(REPRISE_LIBTORCH_FROM "CMAKE_PREFIX_PATH")
  else()
    execute_process(
      COMMAND python3 -c "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE _python_torch OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_QUIET RESULT_VARIABLE _python_status)
    # The path reported by Debian's python3-torch has no TorchConfig.cmake.
    if(_python_status EQUAL 0
       AND EXISTS "${_python_torch}/Torch/TorchConfig.cmake")
      list(PREPEND CMAKE_PREFIX_PATH "${_python_torch}")
      set(REPRISE_LIBTORCH_FROM "python3's torch")
    endif()
  endif()
endif()

find_package(Torch QUIET)
if(NOT Torch_FOUND)
  message(FATAL_ERROR
    "No LibTorch found. Name one with -DREPRISE_TORCH=DIR, install a Python "
    "torch, or on Debian: apt-get install libtorch-dev libopenblas0-pthread")
endif()
if(Torch_VERSION VERSION_LESS 1.13)
  message(FATAL_ERROR
    "LibTorch ${Torch_VERSION} is too old; Reprise needs 1.13 or later")
endif()
message(STATUS "LibTorch ${Torch_VERSION}, from ${REPRISE_LIBTORCH_FROM}")
