#include "report/page.h"

// Included by the assembler, because a string literal of a megabyte compiles slowly and
// exceeds the limit of some compilers.
asm(R"(
    .section .rodata
    .global reprise_page_begin
    .hidden reprise_page_begin
    .global reprise_page_end
    .hidden reprise_page_end
reprise_page_begin:
    .incbin ")" REPRISE_PAGE_FILE R"("
reprise_page_end:
    .byte 0
    .previous
)");

extern "C" {
extern const char reprise_page_begin[];
extern const char reprise_page_end[];
}

namespace reprise::detail {

std::string_view built_in_page() {
  return {reprise_page_begin, reprise_page_end};
}

}  // namespace reprise::detail
