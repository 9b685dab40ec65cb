#include "compat/reserved_scope.h"

namespace reprise::compat {
namespace {

thread_local int t_reserved = 0;

}  // namespace

ReservedScope::ReservedScope() {
  ++t_reserved;
}

ReservedScope::~ReservedScope() {
  --t_reserved;
}

bool ReservedScope::active() {
  return t_reserved > 0;
}

}  // namespace reprise::compat
