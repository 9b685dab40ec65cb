# Packages: `cpack` in the build directory makes packages for Debian, or archives if LibTorch
# is not the system's or libraries are shared. packaging/README.md explains the choices.
set(REPRISE_MAINTAINER "Reprise developers <reprise@packages.invalid>" CACHE STRING
    "Name and address of who makes the packages")

set(CPACK_PACKAGE_NAME reprise)
set(CPACK_PACKAGE_VENDOR "The Reprise developers")
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_CONTACT "${REPRISE_MAINTAINER}")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "train neural networks within a memory budget")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_RESOURCE_FILE_README "${PROJECT_SOURCE_DIR}/README.md")
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL development)
if(REPRISE_BUILD_TOOLS)
  list(PREPEND CPACK_COMPONENTS_ALL runtime)
endif()
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_GENERATOR TGZ)
if(TORCH_INSTALL_PREFIX STREQUAL "/usr" AND NOT BUILD_SHARED_LIBS)
  set(CPACK_GENERATOR DEB)
endif()
foreach(kind OWNER GROUP WORLD)
  list(APPEND permissions ${kind}_READ ${kind}_EXECUTE)
endforeach()
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_WRITE ${permissions})

# Two packages: who trains needs LibTorch alone, who builds needs its headers, which bring
# Python's and protobuf's.
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME reprise)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION science)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
# LibTorch depends on any BLAS; the default one is 30 times slower than OpenBLAS.
set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS libopenblas0-pthread)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SUGGESTS "libreprise-dev, chromium")
set(CPACK_DEBIAN_RUNTIME_DESCRIPTION
"Reprise recomputes activations instead of keeping them, accumulates gradients
over micro-batches, and plans the fastest training that fits into the memory
of a device. This package has the command reprise, which trains, plans,
profiles and compares, its manual page and the completion of its flags.")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libreprise-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
# The static libraries are compiled for one minor version of LibTorch.
string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" torch "${Torch_VERSION}")
math(EXPR next "${CMAKE_MATCH_2} + 1")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS
    "libtorch-dev (>= ${torch}), libtorch-dev (<< ${CMAKE_MATCH_1}.${next}~)"
    "libyaml-cpp-dev" "zlib1g-dev")
list(JOIN CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS ", "
     CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_RECOMMENDS "cmake, g++")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SUGGESTS "reprise (= ${PROJECT_VERSION}-1)")
set(CPACK_DEBIAN_DEVELOPMENT_DESCRIPTION
"Reprise recomputes activations instead of keeping them, accumulates gradients
over micro-batches, and plans the fastest training that fits into the memory
of a device. This package has the headers and static libraries, the files with
which CMake finds them, and what plug-ins of the command are built with.")
# Adds Debian's documents to the packages' files.
set(CPACK_PRE_BUILD_SCRIPTS "${PROJECT_SOURCE_DIR}/packaging/debian/add_documents.cmake")
set(CPACK_REPRISE_SOURCE_DIR "${PROJECT_SOURCE_DIR}")
include(CPack)
