// Reduces the activation memory of a torch::nn::Sequential and checks that the
// gradients do not change.
#include <reprise/reprise.h>

#include <torch/torch.h>

#include <iostream>

int main() {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (int i = 0; i < 32; ++i) {
    model->push_back(torch::nn::Linear(64, 64));
    model->push_back(torch::nn::ReLU());
    model->push_back(torch::nn::Dropout(0.1));
  }
  const auto x = torch::randn({4096, 64});

  const reprise::Chain chain(model);
  const auto train = [&](const char* strategy) {
    const auto schedule = reprise::make_schedule(strategy, chain.size());
    torch::manual_seed(1);
    model->zero_grad();
    const reprise::MemoryMeter meter;
    chain.forward(x, schedule).square().mean().backward();
    std::cout << strategy << ": peak "
              << reprise::format_bytes(meter.peak_increase_bytes()) << "\n";
    return model->parameters()[0].grad().clone();
  };
  const bool equal = torch::equal(train("none"), train("sqrt"));
  std::cout << "gradients equal: " << (equal ? "yes" : "no") << "\n";
  return equal ? 0 : 1;
}
