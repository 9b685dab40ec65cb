#pragma once

/// Everything of the library.

#include <reprise/accumulate/accumulator.h>
#include <reprise/data/dataset.h>
#include <reprise/data/loader.h>
#include <reprise/data/prepare.h>
#include <reprise/data/safetensors.h>
#include <reprise/memory/bytes.h>
#include <reprise/memory/categories.h>
#include <reprise/memory/failure.h>
#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/memory/process.h>
#include <reprise/models/model.h>
#include <reprise/models/weights.h>
#include <reprise/recompute/chain.h>
#include <reprise/recompute/checkpoint.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/replay.h>
#include <reprise/recompute/schedule.h>
#include <reprise/recompute/simulate.h>
#include <reprise/recompute/stage.h>
#include <reprise/recompute/strategy.h>
#include <reprise/recompute/trace.h>
#include <reprise/report/report.h>
#include <reprise/train/config.h>
#include <reprise/train/optimizer.h>
#include <reprise/train/planning.h>
#include <reprise/train/profile.h>
#include <reprise/train/rate.h>
#include <reprise/train/run_directory.h>
#include <reprise/train/scaler.h>
#include <reprise/train/summary.h>
#include <reprise/train/trainer.h>
#include <reprise/verify/verify.h>
