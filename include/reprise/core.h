#pragma once

/// The library reprise::core: gradient checkpointing and accumulation, operators that save
/// less for the backward pass, memory meters and the schedule planner.

#include <reprise/accumulate/accumulator.h>
#include <reprise/base/bytes.h>
#include <reprise/base/enum_text.h>
#include <reprise/base/error.h>
#include <reprise/memory/categories.h>
#include <reprise/memory/host_store.h>
#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/ops/attention.h>
#include <reprise/ops/batch_norm.h>
#include <reprise/ops/concat.h>
#include <reprise/ops/conv.h>
#include <reprise/ops/dropout.h>
#include <reprise/ops/embedding.h>
#include <reprise/ops/linear.h>
#include <reprise/ops/loss.h>
#include <reprise/ops/norm.h>
#include <reprise/ops/pool.h>
#include <reprise/ops/weight_copies.h>
#include <reprise/plan/cluster.h>
#include <reprise/plan/costs.h>
#include <reprise/plan/modes.h>
#include <reprise/plan/planner.h>
#include <reprise/plan/solver.h>
#include <reprise/recompute/chain.h>
#include <reprise/recompute/chain_of.h>
#include <reprise/recompute/check_chain.h>
#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/host_memory.h>
#include <reprise/recompute/keep.h>
#include <reprise/recompute/region.h>
#include <reprise/recompute/schedule.h>
#include <reprise/recompute/simulate.h>
#include <reprise/recompute/stage.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>
#include <reprise/verify/verify.h>
#include <reprise/version.h>
