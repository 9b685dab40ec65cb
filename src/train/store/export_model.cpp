#include "train/store/export_model.h"

#include "base/file.h"
#include "models/weight_files.h"

#include <reprise/models/lora.h>

#include <c10/util/Exception.h>

#include <filesystem>
#include <system_error>

namespace reprise::detail {
namespace {

bool exports_adapter(const Model& model, const std::string& path) {
  return has_lora(model) && !path.ends_with(".safetensors") &&
         !is_weight_index(path);
}

}  // namespace

void export_model(const Model& model, const std::string& path) {
  if (exports_adapter(model, path)) {
    save_lora(model, path);
  } else {
    export_weights(model, path);
  }
}

void check_export_path(const Model& model, const std::string& path) {
  if (exports_adapter(model, path)) {
    const std::string why = why_directory_unwritable(path);
    TORCH_CHECK(why.empty(), "[--export] ", why);
    return;
  }
  std::error_code none;
  TORCH_CHECK(!std::filesystem::is_directory(path, none),
              "[--export] expected a file that can be replaced, ", path,
              " is a directory; only adapters (--lora) are written to one");
  const AtomicFile trial(path);  // throws if it cannot be written
}

}  // namespace reprise::detail
