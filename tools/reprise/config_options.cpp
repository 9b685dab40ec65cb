#include "config_options.h"

#include <reprise/torch/cuda.h>

#include <fmt/format.h>

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
  app.add_option("--weights", c.weights,
                 "Start from this safetensors file (Hugging Face's or "
                 "torchvision's names)")
      ->group("Model");
}

void add_training_flags(CLI::App& app, TrainConfig& c) {
  const auto option = [&](const char* flag, auto& value, const char* text) {
    return app.add_option(flag, value, text)
        ->group("Training")
        ->capture_default_str();
  };
  const auto number = [&](const char* flag, int64_t& value, const char* text) {
    app.add_option(flag, value, text)
        ->group("Training")
        ->check(CLI::PositiveNumber);
  };
  number("--batch", c.batch, "Samples a micro-batch (default 32)");
  number("--accumulate", c.accumulate, "Micro-batches an update (default 1)");
  number("--global-batch", c.global_batch,
         "Samples an update: --batch × --accumulate, the last micro-batch what "
         "is left");
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
  option("--warmup", c.rate.warmup_steps, "Updates of linear warm-up");
  option("--lr-lowest", c.rate.lowest, "Where the cosine ends");
  option("--scale-lr", c.scale_lr,
         "linear or sqrt: scale --lr from --base-batch to the global batch");
  number("--base-batch", c.base_batch, "Global batch that --lr was tuned for");
  option("--momentum", c.optimizer.momentum, "Of sgd");
  app.add_flag("--nesterov", c.optimizer.nesterov, "Nesterov's, of sgd")
      ->group("Training");
  option("--beta1", c.optimizer.beta1, "Of adam, adamw and their 8-bit kinds");
  option("--beta2", c.optimizer.beta2, "Of adam, adamw and their 8-bit kinds");
  app.add_flag("--quantize-embeddings", c.quantize_embeddings,
               "8-bit state of embeddings too, of adam8bit and adamw8bit")
      ->group("Training");
  option("--weight-decay", c.optimizer.weight_decay, "Decay of the weights");
  option("--clip", c.clip, "Largest norm of the gradient (0: any)");
  number("--steps", c.steps, "Updates");
  number("--epochs", c.epochs, "Passes over the data (default 1)");
  option("--seconds", c.seconds,
         "End with the window after so much training (0: with the steps or "
         "epochs)");
  option("--seed", c.seed, "Of weights, order and dropout");
}

void add_data_flags(CLI::App& app, TrainConfig& c) {
  const auto option = [&](const char* flag, auto& value, const char* text) {
    app.add_option(flag, value, text)->group("Data")->capture_default_str();
  };
  option(
      "--data", c.data,
      "mnist, fashion-mnist, random, or a path: IDX images, a text, a .bin of "
      "uint16 tokens (default: mnist for images, random for tokens)");
  option("--random-samples", c.random_samples, "Size of random");
  option("--workers", c.workers, "Threads that load");
  option("--resize", c.resize, "Enlarge images on: device, workers");
}

void add_machine_flags(CLI::App& app, TrainConfig& c) {
  const auto option = [&](const char* flag, auto& value, const char* text) {
    app.add_option(flag, value, text)->group("Machine")->capture_default_str();
  };
  option("--device", c.device, "cpu, cuda or cuda:N");
  option("--threads", c.threads, "CPU threads (0: LibTorch's)");
  option("--layout", c.layout,
         "Of images and convolutions: planes or channels-last");
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
  option("--depth", sizes.depth, "Blocks");
  option("--width", sizes.width, "Hidden size or channels");
  option("--heads", sizes.heads, "Attention heads");
  option("--classes", sizes.classes, "Classes");
  option("--vocab", sizes.vocab, "Tokens of the vocabulary");
  option("--seq", sizes.seq, "Tokens of a sequence");
  option("--image-size", sizes.image_size, "Side of the images in pixels");
  option("--channels", sizes.channels, "Colours of the images");
  option("--norm", sizes.norm, "batch or group");
  option("--dropout", sizes.dropout, "Share of values dropped");
}

void add_graph_flag(CLI::App& app, TrainConfig& config) {
  app.add_option("--graph", config.graph,
                 "Run the micro-step as a CUDA graph: auto (on CUDA, where it "
                 "can be), on, off")
      ->group("Machine")
      ->capture_default_str();
}

CLI::App* add_configured(CLI::App& app, const char* name, const char* text,
                         TrainConfig& config) {
  CLI::App* command = app.add_subcommand(name, text);
  // A flag given twice: the later one counts, so that a script's can be changed.
  command->option_defaults()->multi_option_policy(
      CLI::MultiOptionPolicy::TakeLast);
  add_model_flags(*command, config);
  add_data_flags(*command, config);
  add_training_flags(*command, config);
  add_machine_flags(*command, config);
  return command;
}

std::string default_data(const TrainConfig& config) {
  const Task task = task_of(config.model);
  return task == Task::kImages || task == Task::kPixels ? "mnist" : "random";
}

torch::Device device_of(const std::string& text) {
  torch::Device device(torch::kCPU);
  try {
    device = torch::Device(text);
  } catch (const c10::Error&) {
    throw CLI::ValidationError("--device",
                               "expected cpu, cuda or cuda:N, got " + text);
  }
  if (device.is_cuda() && !device.has_index()) device.set_index(0);
  if (device.is_cuda() && device.index() >= compat::cuda_device_count()) {
    throw CLI::ValidationError(
        "--device", fmt::format("expected one of {} CUDA devices, got {}",
                                compat::cuda_device_count(), text));
  }
  return device;
}

}  // namespace reprise::command
