# reprise_register(TARGET FILE NAME...)
#
# Adds NAME.cpp to TARGET for every NAME, and writes FILE with one line
# REPRISE_REGISTERED(NAME) each, in the given order. The source that collects the entries
# defines the macro and includes <FILE>. Global constructors would not do: the linker drops
# objects of a static library that nothing refers to, and their order is not defined.
function(reprise_register target file)
  set(lines "")
  foreach(name IN LISTS ARGN)
    target_sources(${target} PRIVATE ${name}.cpp)
    string(APPEND lines "REPRISE_REGISTERED(${name})\n")
  endforeach()
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/${file}" CONTENT "${lines}")
  target_include_directories(${target} PRIVATE "${CMAKE_CURRENT_BINARY_DIR}")
endfunction()
