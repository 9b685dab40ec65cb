#pragma once

namespace reprise::compat {

/// Marks work on this thread that must not fail midway, and whose memory was
/// reserved just before. Fault injection (memory/failure.h) neither counts nor
/// fails allocations inside. This is an assumption: a real allocator may still
/// fail, for instance on an eight-byte scalar. Tested by tests/memory/failure_test.cpp.
class ReservedScope {
 public:
  ReservedScope();
  ~ReservedScope();
  ReservedScope(const ReservedScope&) = delete;
  ReservedScope& operator=(const ReservedScope&) = delete;

  static bool active();  ///< whether this thread is inside such a scope
};

}  // namespace reprise::compat
