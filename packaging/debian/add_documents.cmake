# Run by cpack before it makes the packages: adds what Debian's policy asks for to the files
# of each package, and compresses manual pages. Everything is reproducible.
cmake_policy(VERSION 3.22)
if(NOT CPACK_GENERATOR STREQUAL "DEB")
  return()
endif()
set(source "${CPACK_REPRISE_SOURCE_DIR}")
set(version "${CPACK_PACKAGE_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE}")

# gzip_file(FILE): compresses FILE without its name and time.
function(gzip_file file)
  execute_process(COMMAND gzip -9nf "${file}" COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# The date of the version in CHANGELOG.md.
string(REPLACE "." "\\." pattern "${CPACK_PACKAGE_VERSION}")
file(STRINGS "${source}/CHANGELOG.md" entry REGEX "^## \\[${pattern}\\] - ")
string(REGEX MATCH "[0-9]+-[0-9]+-[0-9]+$" day "${entry}")
if(NOT day)
  message(FATAL_ERROR "CHANGELOG.md has no entry with a date for ${CPACK_PACKAGE_VERSION}")
endif()
execute_process(COMMAND date -u -R -d "${day} 12:00"
  OUTPUT_VARIABLE date OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)

foreach(component IN LISTS CPACK_COMPONENTS_ALL)
  string(TOUPPER ${component} upper)
  set(package "${CPACK_DEBIAN_${upper}_PACKAGE_NAME}")
  set(root "${CPACK_TEMPORARY_DIRECTORY}/${component}${CPACK_PACKAGING_INSTALL_PREFIX}")
  set(documents "${root}/share/doc/${package}")
  file(MAKE_DIRECTORY "${documents}")
  configure_file("${source}/packaging/debian/copyright" "${documents}/copyright" COPYONLY)
  configure_file("${source}/CHANGELOG.md" "${documents}/changelog" COPYONLY)
  gzip_file("${documents}/changelog")
  file(CONFIGURE OUTPUT "${documents}/changelog.Debian" @ONLY CONTENT
"reprise (@version@) bookworm; urgency=medium

  * Version @CPACK_PACKAGE_VERSION@; its changes are in changelog.gz.

 -- @CPACK_PACKAGE_CONTACT@  @date@
")
  gzip_file("${documents}/changelog.Debian")
  configure_file("${source}/web/notices.txt" "${documents}/notices.txt" COPYONLY)
  gzip_file("${documents}/notices.txt")
  # Debian's zsh looks for the completions of packages in a folder of its own.
  if(EXISTS "${root}/share/zsh/site-functions")
    file(RENAME "${root}/share/zsh/site-functions" "${root}/share/zsh/vendor-completions")
  endif()
  file(GLOB pages "${root}/share/man/man1/*.1")
  foreach(page IN LISTS pages)
    gzip_file("${page}")
  endforeach()
  file(GLOB_RECURSE files LIST_DIRECTORIES OFF "${documents}/*" "${root}/share/man/*")
  file(CHMOD ${files} PERMISSIONS OWNER_READ OWNER_WRITE GROUP_READ WORLD_READ)
endforeach()
