#include "config_options.h"

#include "checks.h"

#include <fmt/format.h>
#include <torch/cuda.h>

namespace reprise::command {
namespace {

std::string known_models() {
  std::string text;
  for (const ModelInfo& info : model_list()) {
    text += fmt::format("\n  {:<14}{}", info.name, info.description);
  }
  return text;
}

void add_model_flags(CLI::App& app, TrainConfig& c) {
  app.add_option("--model", c.model, "One of:" + known_models())
      ->group("Model")
      ->capture_default_str();
  add_model_sizes(app, c.model_options);
  set_check(app.add_option("--weights", c.weights,
                           "Start from this safetensors file (Hugging Face's "
                           "or torchvision's names)")
                ->group("Model"),
            readable_file());
}

void add_training_flags(CLI::App& app, TrainConfig& c) {
  const auto option = [&](const char* flag, auto& value, const char* text) {
    return app.add_option(flag, value, text)
        ->group("Training")
        ->capture_default_str();
  };
  const auto number = [&](const char* flag, int64_t& value, const char* text) {
    app.add_option(flag, value, text)->group("Training");
  };
  number("--batch", c.batch, "Samples per micro-batch (default 32)");
  number("--accumulate", c.accumulate, "Micro-batches per update (default 1)");
  number("--global-batch", c.global_batch,
         "Samples per update: --batch × --accumulate; the last micro-batch may "
         "be smaller");
  option("--recompute", c.recompute,
         "none, all, sqrt, every:K, checkpoints:K, revolve:S; optimal: the "
         "fastest within --memory; or a schedule as reprise plan prints it "
         "(default: optimal with --memory, else none)");
  option("--precision", c.precision, "fp32, bf16, fp16");
  option(
      "--weight-copies", c.weight_copies,
      "Copy the linear layers' weights to bf16 or fp16 once a window (on) or "
      "at each use, which takes no memory (each), and add their gradients "
      "straight: auto (on CUDA on, or each where --memory needs it), on, each, "
      "off");
  option(
      "--host-memory", c.host_memory,
      "Let plans keep activations in pinned memory of the host, where moving "
      "them takes less time than computing them again: auto (on CUDA, up to "
      "half of what is free), off");
  option("--loss-scale", c.loss_scale, "First scale of the loss, for fp16");
  option("--optimizer", c.optimizer.name,
         "sgd, adam, adamw, adafactor; adam8bit, adamw8bit: with a quarter of "
         "adam's state");
  option("--lr", c.rate.base, "Learning rate");
  option("--lr-schedule", c.rate.schedule, "constant or cosine");
  option("--warmup", c.rate.warmup_steps,
         "Number of updates of linear warm-up");
  option("--lr-lowest", c.rate.lowest, "Last learning rate of cosine");
  option("--scale-lr", c.scale_lr,
         "linear or sqrt: scale --lr from --base-batch to the global batch");
  number("--base-batch", c.base_batch, "Global batch that --lr was tuned for");
  option("--momentum", c.optimizer.momentum, "Momentum of sgd");
  app.add_flag("--nesterov", c.optimizer.nesterov, "Nesterov momentum of sgd")
      ->group("Training");
  option("--beta1", c.optimizer.beta1,
         "First beta of adam, adamw, adam8bit and adamw8bit");
  option("--beta2", c.optimizer.beta2, "Second beta of the same");
  app.add_flag("--quantize-embeddings", c.quantize_embeddings,
               "8-bit state of embeddings too, of adam8bit and adamw8bit")
      ->group("Training");
  option("--weight-decay", c.optimizer.weight_decay, "Weight decay");
  option("--clip", c.clip, "Largest norm of the gradient (0: no limit)");
  number("--steps", c.steps, "Number of updates");
  number("--epochs", c.epochs, "Passes over the data (default 1)");
  option("--seconds", c.seconds,
         "End with the window after so much training (0: with the steps or "
         "epochs)");
  option("--seed", c.seed, "Seed of weights, data order and dropout");
}

void add_data_flags(CLI::App& app, TrainConfig& c) {
  const auto option = [&](const char* flag, auto& value, const char* text) {
    return app.add_option(flag, value, text)
        ->group("Data")
        ->capture_default_str();
  };
  set_check(
      option("--data", c.data,
             "mnist, fashion-mnist, random, or a path: IDX images, a text, a "
             ".bin of uint16 tokens (default: mnist for images, random for "
             "tokens)"),
      data_source());
  option("--random-samples", c.random_samples, "Number of samples in random");
  option("--workers", c.workers, "Threads that load data");
  option("--resize", c.resize, "Where to enlarge images: device, workers");
}

void add_machine_flags(CLI::App& app, TrainConfig& c) {
  const auto option = [&](const char* flag, auto& value, const char* text) {
    app.add_option(flag, value, text)->group("Machine")->capture_default_str();
  };
  option("--device", c.device, "cpu, cuda or cuda:N");
  option("--threads", c.threads, "CPU threads (0: LibTorch's)");
  option("--layout", c.layout,
         "Memory layout of images and convolutions: planes or channels-last");
  app.add_flag("--tf32", c.tf32,
               "Products and convolutions of fp32 in TF32, on CUDA")
      ->group("Machine");
  option("--fp32-products", c.fp32_products,
         "Products of fp32 on CUDA: auto (on tensor cores where that is as "
         "exact), library");
  app.add_flag("--autotune", c.autotune,
               "Let cuDNN try its algorithms; takes more memory")
      ->group("Machine");
}

}  // namespace

void add_model_sizes(CLI::App& app, ModelOptions& sizes) {
  const auto option = [&](const char* flag, auto& value, const char* text) {
    return app.add_option(flag, value, text)->group("Model");
  };
  option("--depth", sizes.depth, "Number of blocks");
  option("--width", sizes.width, "Hidden size or channels");
  option("--heads", sizes.heads, "Number of attention heads");
  option("--classes", sizes.classes, "Number of classes");
  option("--vocab", sizes.vocab, "Number of tokens in the vocabulary");
  option("--seq", sizes.seq, "Number of tokens per sequence");
  option("--image-size", sizes.image_size,
         "Height and width of the images in pixels");
  option("--channels", sizes.channels, "Number of image channels");
  option("--norm", sizes.norm, "Normalisation: batch or group");
  option("--dropout", sizes.dropout,
         "Probability of dropout, from 0 to below 1");
  check_fields(app);
}

void add_graph_flag(CLI::App& app, TrainConfig& config) {
  set_check(app.add_option("--graph", config.graph,
                           "Run the micro-step as a CUDA graph: auto (on CUDA, "
                           "if it can be captured), on, off")
                ->group("Machine")
                ->capture_default_str(),
            *field_check("--graph"));
}

CLI::App* add_configured(CLI::App& app, const char* name, const char* text,
                         TrainConfig& config) {
  CLI::App* command = app.add_subcommand(name, text);
  // If a flag is given twice the later one counts, so that a script's can be
  // changed.
  command->option_defaults()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  add_model_flags(*command, config);
  add_data_flags(*command, config);
  add_training_flags(*command, config);
  add_machine_flags(*command, config);
  check_fields(*command);
  return command;
}

CLI::Option* add_memory_flag(CLI::App& app, std::string& memory,
                             const std::string& text) {
  // Below, a unit was forgotten.
  constexpr int64_t kLeast = 1024;
  return set_check(app.add_option("--memory", memory,
                                  text + "; KiB, MiB, GiB are powers of 1024, "
                                         "kB, MB, GB powers of 1000")
                       ->group("Machine"),
                   byte_size(kLeast));
}

void add_format_flag(CLI::App& app, std::string& format,
                     const std::string& text) {
  set_check(app.add_option("--format", format, text)
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
                ->capture_default_str(),
            one_of({"table", "json"}));
}

std::string default_data(const TrainConfig& config) {
  const Task task = task_of(config.model);
  return task == Task::kImages || task == Task::kPixels ? "mnist" : "random";
}

torch::Device device_of(const std::string& text) {
  const std::string error = device_name()(text);
  if (!error.empty()) throw CLI::ValidationError("--device", error);
  torch::Device device(text);
  if (device.is_cuda() && !device.has_index()) device.set_index(0);
  const int count = static_cast<int>(torch::cuda::device_count());
  if (device.is_cuda() && device.index() >= count) {
    throw CLI::ValidationError(
        "--device",
        count == 0
            ? fmt::format("expected cpu, no CUDA devices are here, got {}",
                          text)
            : fmt::format("expected one of {} CUDA devices, cuda:0 to cuda:{}, "
                          "got {}",
                          count, count - 1, text));
  }
  return device;
}

}  // namespace reprise::command
