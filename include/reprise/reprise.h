#pragma once

/// All public headers. A program that needs only a part compiles faster with
/// <reprise/core.h>, <reprise/train.h> or single headers.
#include <reprise/study.h>
