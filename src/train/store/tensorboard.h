#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace reprise {

namespace detail {
class AppendLog;
}

/// Writes scalars in TensorBoard's event format (records with masked CRC-32C,
/// each an Event protocol buffer) to a new file in `directory`, which is
/// created if necessary. Writes are not buffered, so that a killed run loses no
/// events. Throws c10::Error if the directory cannot be created, and
/// reprise::Error if the file cannot be written.
class EventWriter {
 public:
  explicit EventWriter(const std::string& directory);
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  /// Appends one value; `tag` is a name such as "train/loss".
  void scalar(const std::string& tag, double value, int64_t step);

  const std::string& path() const;

 private:
  std::unique_ptr<detail::AppendLog> log_;
};

}  // namespace reprise
