#pragma once

#include <reprise/train/optimizer.h>

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// The optimizers behind make_optimizer(). ListOptimizer gathers what has a
/// gradient, keeps state and counters, saves and loads them; a derived class
/// says which state there is and does the arithmetic.
namespace reprise {

class ListOptimizer : public Optimizer {
 public:
  /// `kinds`: names of what is kept for a parameter, such as "exp_avg".
  ListOptimizer(const NamedTensors& parameters, std::vector<std::string> kinds);

  void step(double lr) final;
  NamedTensors state() const final;
  std::vector<torch::Tensor> held() const override;
  void load(const NamedTensors& state) final;

 protected:
  using Tensors = std::vector<torch::Tensor>;

  /// Parallel lists of the parameters to update.
  struct List {
    Tensors parameters;
    Tensors gradients;
    std::vector<int64_t> counts;  // of each one's update, from 1
    std::vector<Tensors> state;   // by kind
    Tensors workspace;            // of make_workspace()
  };

  /// Shape of what is kept of `kind` for `parameter`; none: nothing is.
  virtual std::optional<std::vector<int64_t>> shape_of(
      size_t kind, const torch::Tensor& parameter) const;

  /// Its type; the parameter's unless overridden.
  virtual torch::ScalarType type_of(size_t kind,
                                    const torch::Tensor& parameter) const;

  /// One update. May use temporaries as temporaries() says, and scalars.
  virtual void update(const List& list, double lr) = 0;

  /// What update() takes at one moment: nothing, or as much as the largest
  /// parameter of the list or as the whole list; or the list's workspace, and
  /// then it is given all parameters of one device and type and divides them
  /// itself.
  enum class Temporaries { kNone, kLargest, kList, kWorkspace };
  virtual Temporaries temporaries() const = 0;

  /// For kWorkspace; what update() writes to. Nothing has changed yet.
  virtual Tensors make_workspace(const List& list);

  /// Whether update_fused() can be used for lists on `device`.
  virtual bool has_fused(torch::Device device) const;
  virtual void update_fused(const List& list, double lr);

 private:
  /// One parameter and what is kept for it.
  struct Entry {
    std::string name;
    torch::Tensor parameter;
    // Updates so far. torch.optim too counts them a parameter: one that gets
    // its first gradient late starts its bias correction then.
    int64_t count = 0;
    Tensors state;  // by kind; undefined before the first update
  };

  std::vector<Entry*> with_gradient();
  void make_state(Entry& entry) const;
  torch::Tensor make_tensor(size_t kind, const torch::Tensor& parameter) const;
  bool can_fuse(const std::vector<Entry*>& entries) const;
  List list_of(const std::vector<Entry*>& entries) const;
  std::vector<List> lists_of(const std::vector<Entry*>& entries) const;
  std::vector<List> lists_by_type(const std::vector<Entry*>& entries) const;
  void reserve(const std::vector<List>& lists) const;
  void update_all(const std::vector<List>& lists, bool fused, double lr);

  /// A state by entry, as load() is given it.
  struct Saved {
    int64_t step = 0;
    std::vector<std::optional<int64_t>> counts;  // where they differ from step
    std::vector<Tensors> tensors;                // by kind
  };
  Saved sort(const NamedTensors& state) const;
  void check_complete(const Saved& saved) const;

  std::vector<std::string> kinds_;
  std::vector<Entry> entries_;
  int64_t step_ = 0;
};

std::unique_ptr<Optimizer> make_sgd(const OptimizerOptions& options,
                                    const NamedTensors& parameters);
/// adam and adamw.
std::unique_ptr<Optimizer> make_adam(const OptimizerOptions& options,
                                     const NamedTensors& parameters);
/// adam8bit and adamw8bit.
std::unique_ptr<Optimizer> make_adam8bit(const OptimizerOptions& options,
                                         const NamedTensors& parameters);
std::unique_ptr<Optimizer> make_adafactor(const OptimizerOptions& options,
                                          const NamedTensors& parameters);

}  // namespace reprise
