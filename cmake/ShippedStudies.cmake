# Generates SOURCE with the studies in DIRECTORY as string literals, so that the command
# needs no data files.
function(reprise_ship_studies directory source)
  file(GLOB files CONFIGURE_DEPENDS ${directory}/*.yaml)
  set(entries "")
  foreach(file IN LISTS files)
    get_filename_component(name ${file} NAME_WE)
    file(READ ${file} text)
    string(APPEND entries "      {\"${name}\", R\"~~(${text})~~\"},\n")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  endforeach()
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[
// Generated from studies/.
#include <reprise/study/study_file.h>

namespace reprise {

const std::vector<std::pair<std::string, std::string>>& shipped_studies() {
  static const std::vector<std::pair<std::string, std::string>> studies = {
@entries@  };
  return studies;
}

}  // namespace reprise
]])
endfunction()
