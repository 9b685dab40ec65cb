# Plug-ins of the command; see docs/own-model.md.

# reprise_add_plugin(NAME SOURCE...)
#
# Adds a shared library with models and datasets for `reprise --plugin`. It uses the
# libraries of Reprise that are in the program, and has no copy of them.
function(reprise_add_plugin name)
  add_library(${name} MODULE ${ARGN})
  target_link_libraries(${name} PRIVATE reprise::plugin)
endfunction()

# reprise_allow_plugins(PROGRAM)
#
# Links PROGRAM with all of reprise::command and exports its symbols to plug-ins.
function(reprise_allow_plugins program)
  set(symbols "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/plugin-symbols.txt")
  set(archives "")
  foreach(component core train study command)
    get_target_property(type reprise::${component} TYPE)
    if(type STREQUAL STATIC_LIBRARY)
      string(APPEND archives ",$<TARGET_FILE:reprise::${component}>")
    endif()
  endforeach()
  target_link_libraries(${program} PRIVATE reprise::command)
  target_link_options(${program} PRIVATE
    "LINKER:--dynamic-list=${symbols}"
    "LINKER:--whole-archive${archives},--no-whole-archive")
  set_property(TARGET ${program} APPEND PROPERTY
    LINK_DEPENDS "${symbols}")
endfunction()
