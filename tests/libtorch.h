#pragma once

// The LibTorch headers that most tests use; precompiled. torch/torch.h would double the
// compile time of each test, because its templates are instantiated in every one.
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>
