// A model with options of its own, as a plug-in for the command:
//
//   reprise train --plugin ./libforecast.so --model forecast --taps 5 --out run
//   reprise train --resume run --epochs 3
//   reprise plan --plugin ./libforecast.so --model forecast --global-batch 64 --memory 8MiB
//   reprise verify --plugin ./libforecast.so --model forecast --gate
//   reprise launch -n 2 -- train --plugin ./libforecast.so --model forecast
//   reprise study --plugin ./libforecast.so my.yaml    # with taps: [3, 5]
#include <reprise/command.h>
#include <reprise/recompute/stage.h>

#include <torch/nn/functional.h>
#include <torch/nn/modules.h>

namespace {

using torch::Tensor;

/// Signals: sums of two sines with random frequencies and phases.
class Signals final : public reprise::Dataset {
 public:
  explicit Signals(const reprise::DataOptions& options) {
    const bool train = options.split == reprise::Split::kTrain;
    auto generator = at::detail::createCPUGenerator(train ? 1 : 2);
    const int64_t count = train ? 512 : 64;
    const auto random = [&] {
      return torch::rand({count, 1}, generator, torch::kFloat);
    };
    const Tensor time = torch::arange(kLength + 1).unsqueeze(0);
    for (int i = 0; i < 2; ++i) {
      const Tensor wave = torch::sin(time * (random() + 0.1) + random() * 6.28);
      values_ = values_.defined() ? values_ + wave : wave;
    }
  }
  int64_t size() const override { return values_.size(0); }
  reprise::Batch get(const std::vector<int64_t>& indices) const override {
    const Tensor rows = values_.index_select(0, torch::tensor(indices));
    const auto n = static_cast<int64_t>(indices.size());
    return {.tensors = {rows.narrow(1, 0, kLength).unsqueeze(1),
                        rows.narrow(1, 1, kLength).unsqueeze(1)},
            .samples = n,
            .count = n};
  }
  std::string description() const override { return "sums of sines"; }

  static constexpr int64_t kLength = 128;

 private:
  Tensor values_;
};

/// A convolution that sees the past only, with a residual connection.
struct FilterImpl : torch::nn::Module {
  FilterImpl(int64_t width, int64_t taps, int64_t dilation, bool gate)
      : past((taps - 1) * dilation),
        gated(gate),
        conv(register_module(
            "conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(
                                          width, gate ? 2 * width : width, taps)
                                          .dilation(dilation)))) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = conv(torch::constant_pad_nd(x, {past, 0}));
    return x + (gated ? torch::glu(y, 1) : torch::tanh(y));
  }
  int64_t past;
  bool gated;
  torch::nn::Conv1d conv;
};
TORCH_MODULE(Filter);

/// A chain on {signal, the signal one step later}.
reprise::Model make_forecast(const reprise::ModelOptions& options) {
  const int64_t taps = options.get<int64_t>("taps");
  const bool gate = options.get<bool>("gate");
  auto root = std::make_shared<torch::nn::Module>();
  const auto conv = [&](const char* name, int64_t in, int64_t out) {
    return root->register_module(
        name, torch::nn::Conv1d(torch::nn::Conv1dOptions(in, out, 1)));
  };
  const auto first = conv("first", 1, options.width);
  std::vector<reprise::Stage> stages = {
      reprise::make_stage("first", first).on_first()};
  for (int64_t i = 0; i < options.depth; ++i) {
    const std::string name = "filter" + std::to_string(i);
    const auto filter = root->register_module(
        name, Filter(options.width, taps, int64_t{1} << (i % 5), gate));
    stages.push_back(reprise::make_stage(name, filter).on_first());
  }
  const auto last = conv("last", options.width, 1);
  stages.push_back(reprise::make_stage(
      "loss",
      [last](const Tensor& x, const Tensor& next) {
        const Tensor error = last->forward(x) - next;
        return reprise::Tensors{error.square().mean({1, 2}).sum()};
      },
      {last}));
  return {.root = root, .chain = reprise::Chain(stages)};
}

void register_forecast() {
  reprise::ModelOptions defaults;
  defaults.depth = 5;
  defaults.width = 32;
  reprise::register_model(
      {.name = "forecast",
       .description = "causal filters that continue a signal",
       .defaults = defaults,
       .make = make_forecast,
       .data = "signals",
       .own_options = {
           {.name = "taps",
            .help = "Number of taps per filter",
            .value = 3,
            .lowest = 1,
            .highest = 64},
           {.name = "gate", .help = "Gated filters", .value = false}}});
  reprise::register_dataset(
      {.name = "signals", .open = [](const reprise::DataOptions& options) {
         return std::make_shared<Signals>(options);
       }});
}

}  // namespace

REPRISE_COMMAND(register_forecast);
