// Throughput of the loader: samples/s and the fraction of time that a step waits for
// data, with images resized on the device (bytes are copied) and in the loader's
// workers (floats are copied). The training step is simulated by a pause of --step-ms.
#include "compat/cuda.h"
#include "options.h"
#include "side_by_side.h"

#include <reprise/data/dataset.h>
#include <reprise/data/loader.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/types.h>

#include <chrono>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Settings {
  std::string data = "random";
  std::string device = "cpu";
  int64_t image_size = 1792;
  int64_t batch = 8;
  int workers = 4;
  int steps = 50;
  double step_ms = 0;
};

struct Row {
  std::string resize;
  double samples_per_s = 0;
  double step_ms = 0;        // mean, including waiting
  double waiting_share = 0;  // fraction of the wall time
};

constexpr int kWarmUpSteps = 5;

Row measure(const std::shared_ptr<const reprise::Dataset>& data,
            const Settings& settings, bool in_workers) {
  const torch::Device device = reprise::bench::device_named(settings.device);
  const reprise::PrepareOptions prepare{.image_size = settings.image_size,
                                        .mean = data->mean(),
                                        .stddev = data->stddev()};
  reprise::LoaderOptions options{.batch = settings.batch,
                                 .workers = settings.workers,
                                 .pin = device.is_cuda()};
  if (in_workers) {
    options.transform = [prepare](reprise::Batch& batch) {
      reprise::prepare(batch, prepare);
    };
  }
  reprise::Loader loader(data, options);
  int64_t samples = 0;
  const auto step = [&] {
    auto batch = loader.next();
    if (!batch) batch = loader.next();
    reprise::move_to(*batch, device);
    reprise::prepare(*batch, prepare);
    std::this_thread::sleep_for(
        std::chrono::duration<double, std::milli>(settings.step_ms));
    if (device.is_cuda()) reprise::compat::cuda_synchronize(device.index());
    samples += batch->samples;
  };
  for (int i = 0; i < kWarmUpSteps; ++i) step();
  samples = 0;
  const double waited_before_s = loader.waited_s();
  const double wall_ms = reprise::bench::milliseconds([&] {
    for (int i = 0; i < settings.steps; ++i) step();
  });
  return {
      .resize = in_workers ? "workers" : "device",
      .samples_per_s = static_cast<double>(samples) / wall_ms * 1e3,
      .step_ms = wall_ms / settings.steps,
      .waiting_share = (loader.waited_s() - waited_before_s) * 1e3 / wall_ms};
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  std::string format = "table";
  reprise::bench::Options(
      "Samples a second, and how long a step waits for data")
      .add("--data", &settings.data, "As for the command")
      .add_device(&settings.device)
      .add_positive("--image-size", &settings.image_size,
                    "Side length to resize to")
      .add_positive("--batch", &settings.batch, "Samples per step")
      .add("--workers", &settings.workers, "Number of worker threads")
      .add_positive("--steps", &settings.steps, "Number of measured steps")
      .add("--step-ms", &settings.step_ms,
           "Duration of the simulated step in ms")
      .add_format(&format)
      .parse(argc, argv);

  const auto data = reprise::open_dataset(
      {.name = settings.data, .classes = 10, .random_samples = 4096});
  const std::vector<Row> rows = {measure(data, settings, false),
                                 measure(data, settings, true)};
  if (format == "json") {
    nlohmann::json list = nlohmann::json::array();
    for (const Row& row : rows) {
      list.push_back({{"resize", row.resize},
                      {"samples_per_s", row.samples_per_s},
                      {"step_ms", row.step_ms},
                      {"waiting_share", row.waiting_share}});
    }
    std::cout << nlohmann::json{{"device", settings.device},
                                {"libtorch", reprise::libtorch_version()},
                                {"image_size", settings.image_size},
                                {"batch", settings.batch},
                                {"workers", settings.workers},
                                {"pause_ms", settings.step_ms},
                                {"rows", list}}
                     .dump(2)
              << "\n";
    return 0;
  }
  fmt::print(
      "LibTorch {}, {}, {}, to {}², batch {}, {} workers, pause {} ms\n\n",
      reprise::libtorch_version(), settings.device, data->description(),
      settings.image_size, settings.batch, settings.workers, settings.step_ms);
  fmt::print("{:<10}{:>12}{:>12}{:>12}\n", "resize", "samples/s", "step ms",
             "waiting");
  for (const Row& row : rows) {
    fmt::print("{:<10}{:>12.1f}{:>12.2f}{:>11.1f}%\n", row.resize,
               row.samples_per_s, row.step_ms, 100 * row.waiting_share);
  }
  return 0;
}
