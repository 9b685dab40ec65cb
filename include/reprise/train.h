#pragma once

/// The library reprise::train: the trainer with its data, models and ranks, and reprise::core.

#include <reprise/core.h>
#include <reprise/data/dataset.h>
#include <reprise/data/loader.h>
#include <reprise/data/safetensors.h>
#include <reprise/data/sequences.h>
#include <reprise/data/stream.h>
#include <reprise/distributed/group.h>
#include <reprise/distributed/launch.h>
#include <reprise/models/lora.h>
#include <reprise/models/model.h>
#include <reprise/models/registry.h>
#include <reprise/models/script.h>
#include <reprise/train/check.h>
#include <reprise/train/config.h>
#include <reprise/train/fields.h>
#include <reprise/train/inputs.h>
#include <reprise/train/optimizer.h>
#include <reprise/train/options.h>
#include <reprise/train/own_loop.h>
#include <reprise/train/planning.h>
#include <reprise/train/profile.h>
#include <reprise/train/run.h>
#include <reprise/train/run_directory.h>
#include <reprise/train/scaler.h>
#include <reprise/train/summary.h>
#include <reprise/train/trainer.h>
