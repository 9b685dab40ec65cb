#pragma once

// What most tests have of LibTorch, precompiled. With all of torch/torch.h each of them
// would take twice as long to compile: its templates are made again in every one.
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>
