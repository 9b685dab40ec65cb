// Files with the text of a plug-in that cannot be used; for plugin_test.py. BROKEN is one of
// the numbers below.
#include <reprise/version.h>

#include <cstdint>

#define VISIBLE extern __attribute__((visibility("default")))

#if BROKEN == 1  // needs a variable that no program has
namespace reprise {
extern const int no_such_variable;
}
#endif

extern "C" {
#if BROKEN == 1
VISIBLE const int* const broken_needs;
const int* const broken_needs = &reprise::no_such_variable;
#endif

#if BROKEN == 2  // has no entry
VISIBLE const char broken_build[];
const char broken_build[] = REPRISE_BUILD;
#else
struct Plugin {
  const char* build;
  uint64_t layout;
  void (*register_own)();
};
VISIBLE const Plugin reprise_plugin;
const Plugin reprise_plugin = {REPRISE_BUILD, BROKEN, nullptr};
#endif
}
