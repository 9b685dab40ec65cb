# An overlay port: it builds the sources that it is a part of.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)

vcpkg_check_features(OUT_FEATURE_OPTIONS features
  FEATURES tools REPRISE_BUILD_TOOLS)

# A port downloads nothing while it builds: set REPRISE_PAGE to a page that
# scripts/page.sh made, else `reprise report` says that the page is missing.
set(ENV{REPRISE_SETUP} off)

vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    ${features}
    -DREPRISE_BUILD_TESTS=OFF
    -DREPRISE_BUILD_BENCH=OFF
    "-DREPRISE_TORCH=${CURRENT_INSTALLED_DIR}"
    "-DREPRISE_PAGE=$ENV{REPRISE_PAGE}")
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/reprise)

if("tools" IN_LIST FEATURES)
  vcpkg_copy_tools(TOOL_NAMES reprise AUTO_CLEAN)
endif()
file(REMOVE_RECURSE
  "${CURRENT_PACKAGES_DIR}/debug/include"
  "${CURRENT_PACKAGES_DIR}/debug/share")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE" "${SOURCE_PATH}/web/notices.txt")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage"
  DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
