#pragma once

/// Everything of the library.

#include <reprise/accumulate/accumulator.h>
#include <reprise/memory/bytes.h>
#include <reprise/memory/categories.h>
#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/memory/process.h>
#include <reprise/recompute/chain.h>
#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/replay.h>
#include <reprise/recompute/schedule.h>
#include <reprise/recompute/simulate.h>
#include <reprise/recompute/stage.h>
#include <reprise/recompute/strategy.h>
#include <reprise/recompute/trace.h>
#include <reprise/verify/verify.h>
