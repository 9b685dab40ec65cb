#include "models/layers.h"

#include "models/loss.h"

#include <c10/util/Exception.h>
#include <torch/nn/init.h>

namespace reprise::detail {

using torch::Tensor;
using torch::nn::Linear;

void check_image_size(const std::string& name, const ModelOptions& options,
                      bool supported, const std::string& sizes) {
  TORCH_CHECK(supported, "[model ", name, "] cannot take image size ",
              options.image_size, "; it can take ", sizes);
}

ModulePtr add_container(torch::nn::Module& parent, const std::string& name) {
  return parent.register_module(name, std::make_shared<torch::nn::Module>());
}

void normal_init(Tensor weight, double deviation) {
  torch::nn::init::normal_(weight, 0, deviation);
}

void zero_init(Tensor bias) {
  torch::nn::init::zeros_(bias);
}

void add_classifier(BuiltModel& built, const std::string& name, Linear head) {
  built.root->register_module(name, head);
  built.stages.push_back(make_stage(name, head).on_first());
  const auto loss = built.root->register_module("loss", Loss(Task::kImages));
  built.stages.push_back(make_stage("loss", loss));
}

void add_hidden_layer(BuiltModel& built, const std::string& name, Linear linear,
                      double dropout) {
  built.root->register_module(name, linear);
  built.stages.push_back(
      make_stage(name,
                 [linear, dropout](const Tensor& x) mutable {
                   const Tensor y =
                       relu_inplace(run_linear(linear, x.flatten(1)));
                   if (dropout == 0) return y;
                   return torch::dropout(y, dropout, linear->is_training());
                 },
                 {linear.ptr()})
          .of_kind("hidden")
          .on_first());
}

}  // namespace reprise::detail
