#include "plan/solver_model.h"

#include <algorithm>

namespace reprise::detail {
namespace {

// Maximum number of contexts per boundary. A chain with one tensor between
// stages has two: held outside or not. Further tensors passed along increase
// the number.
constexpr size_t kMaxContexts = 16;

class ModelBuilder {
 public:
  ModelBuilder(const ChainCosts& chain_costs, const ModelLimits& limits)
      : chain_costs_(chain_costs),
        n_(static_cast<int>(chain_costs.stages.size())) {
    model_.stages = n_;
    find_boundaries();
    choose_times();
    choose_ends(limits);
    for (int s = 0; s < n_; ++s) add_start(s);
    model_.first_position = {0};
    for (size_t s = 0; s < model_.contexts.size(); ++s) {
      model_.first_position.push_back(model_.first_position.back() +
                                      model_.contexts[s].size() *
                                          model_.ends[s].size());
    }
  }

  ChainModel take() { return std::move(model_); }

 private:
  struct Buffer {
    int64_t bytes;
    int maker;  // stage that created it; -1 for the caller
  };
  struct Boundary {
    std::vector<int> tensors;   // buffer of each tensor, in order
    std::vector<int> distinct;  // distinct buffers with a size
    int64_t made_bytes = 0;     // allocated by the stage before it
  };

  const StageCosts& stage(int s) const {
    return chain_costs_.stages[static_cast<size_t>(s)];
  }
  const Boundary& boundary(int s) const {
    return boundaries_[static_cast<size_t>(s)];
  }
  const Buffer& buffer(int id) const {
    return buffers_[static_cast<size_t>(id)];
  }

  int make_buffer(int64_t bytes, int maker) {
    buffers_.push_back({bytes, maker});
    return static_cast<int>(buffers_.size()) - 1;
  }

  void find_boundaries() {
    Boundary input;
    for (const int64_t bytes : chain_costs_.input_bytes) {
      input.tensors.push_back(make_buffer(bytes, -1));
    }
    boundaries_.push_back(input);
    for (int s = 0; s < n_; ++s) {
      Boundary next;
      for (const auto& output : stage(s).outputs) {
        const bool made = output.input < 0;
        const int id =
            made ? make_buffer(output.bytes, s)
                 : boundary(s).tensors.at(static_cast<size_t>(output.input));
        next.tensors.push_back(id);
        if (made) next.made_bytes += output.bytes;
        auto& list = next.distinct;
        if (buffer(id).maker >= 0 && buffer(id).bytes > 0 &&
            std::find(list.begin(), list.end(), id) == list.end()) {
          list.push_back(id);
        }
      }
      boundaries_.push_back(std::move(next));
    }
    model_.output_bytes = bytes_of(n_, 0);
  }

  /// Returns the bytes of boundary s created by stage `from` or later.
  int64_t bytes_of(int s, int from) const {
    int64_t bytes = 0;
    for (const int id : boundary(s).distinct) {
      if (buffer(id).maker >= from) bytes += buffer(id).bytes;
    }
    return bytes;
  }

  /// The device runs and the host launches concurrently, and the slower one
  /// determines the time of the whole chain. Recomputing a stage costs the time
  /// of the slower one.
  void choose_times() {
    double device = 0, launch = 0;
    for (const auto& costs : chain_costs_.stages) {
      device += costs.forward_ms + costs.backward_ms;
      launch += costs.forward_launch_ms + costs.backward_launch_ms;
    }
    launch_bound_ = launch > device;
    model_.forward_ms = {0};
    for (int s = 0; s < n_; ++s) {
      model_.forward_ms.push_back(model_.forward_ms.back() +
                                  forward_ms(stage(s)));
    }
  }

  double forward_ms(const KeptRunCosts& run) const {
    return launch_bound_ ? run.forward_launch_ms : run.forward_ms;
  }
  double backward_ms(const KeptRunCosts& run) const {
    return launch_bound_ ? run.backward_launch_ms : run.backward_ms;
  }

  /// At most what makes a second run of the stage, to save it, useless.
  double unused_ms(int s, const KeptRunCosts& run) const {
    if (launch_bound_) return 0;
    const auto ms = [&](const KeptRunCosts& one) {
      return forward_ms(one) + backward_ms(one);
    };
    double fastest = ms(stage(s));
    for (const auto& variant : stage(s).variants) {
      fastest = std::min(fastest, ms(variant));
    }
    return std::min(run.unused_output_ms,
                    ms(run) - fastest + forward_ms(stage(s)));
  }

  void choose_ends(const ModelLimits& limits) {
    const bool all = n_ <= limits.all;
    model_.near = all ? n_ : limits.near;
    std::vector<bool> far(static_cast<size_t>(n_) + 1);
    far.front() = far.back() = true;
    const int inner = n_ - 1;  // boundaries 1 … n-1
    const int groups = all ? 0 : std::min(inner, limits.far);
    for (int64_t g = 0; g < groups; ++g) {
      int best = static_cast<int>(g * inner / groups) + 1;
      const int stop = static_cast<int>((g + 1) * inner / groups) + 1;
      for (int s = best + 1; s < stop; ++s) {
        if (bytes_of(s, 0) < bytes_of(best, 0)) best = s;
      }
      far[static_cast<size_t>(best)] = true;
    }
    model_.far_before = {0};
    for (const bool is : far) {
      model_.far_before.push_back(model_.far_before.back() + (is ? 1 : 0));
    }
    for (int s = 0; s < n_; ++s) {
      std::vector<int> ends;
      for (int t = s + 1; t <= n_; ++t) {
        if (model_.is_end(s, t)) ends.push_back(t);
      }
      model_.ends.push_back(std::move(ends));
      model_.gradient_bytes.push_back(stage(s).input_gradient_bytes);
    }
    model_.gradient_bytes.push_back(0);  // the forward pass
  }

  void add_start(int s) {
    auto& contexts = model_.contexts;
    contexts.resize(static_cast<size_t>(n_));
    if (s == 0) find_context(0, 0);
    for (size_t c = 0; c < contexts[static_cast<size_t>(s)].size(); ++c) {
      add_kept_runs(s, static_cast<int>(c));
    }
    std::vector<DroppedRun> drops;
    int64_t most = 0;
    int j = s;
    for (const int t : model_.ends_of(s)) {
      for (; j < t; ++j) {
        const int64_t input = j == s ? 0 : bytes_of(j, s);
        most = std::max(most, input + boundary(j + 1).made_bytes +
                                  stage(j).drop_extra_bytes);
      }
      drops.push_back({most, t < n_ ? find_context(t, pinned_by(s, t)) : 0});
    }
    model_.drops.push_back(std::move(drops));
  }

  /// Returns the buffers that boundary t shares with the earlier boundary s.
  uint64_t pinned_by(int s, int t) const {
    return mask(t, [&](int id) { return buffer(id).maker < s; });
  }

  template <class F>
  uint64_t mask(int s, F&& pinned) const {
    uint64_t bits = 0;
    const auto& list = boundary(s).distinct;
    // Buffers without a bit count as not pinned, which overestimates memory.
    for (size_t i = 0; i < std::min<size_t>(list.size(), 64); ++i) {
      if (pinned(list[i])) bits |= uint64_t{1} << i;
    }
    return bits;
  }

  /// Returns the context of start s with these buffers pinned. If there are too
  /// many contexts, returns the one without pinned buffers, which counts them
  /// twice.
  int find_context(int s, uint64_t pinned) {
    auto& list = model_.contexts[static_cast<size_t>(s)];
    const auto find = [&](uint64_t bits) {
      return std::find_if(list.begin(), list.end(),
                          [&](const Context& c) { return c.pinned == bits; });
    };
    if (list.size() + 1 >= kMaxContexts && find(pinned) == list.end()) {
      pinned = 0;
    }
    const auto found = find(pinned);
    if (found != list.end()) return static_cast<int>(found - list.begin());
    Context context;
    context.pinned = pinned;
    const auto& buffers = boundary(s).distinct;
    for (size_t i = 0; i < buffers.size(); ++i) {
      const bool others = i < 64 && ((pinned >> i) & 1) != 0;
      if (!others) context.own_bytes += buffer(buffers[i]).bytes;
    }
    list.push_back(std::move(context));
    return static_cast<int>(list.size()) - 1;
  }

  bool is_pinned(int s, const Context& context, int id) const {
    const auto& list = boundary(s).distinct;
    const auto at = static_cast<size_t>(
        std::find(list.begin(), list.end(), id) - list.begin());
    return at < std::min<size_t>(list.size(), 64) &&
           ((context.pinned >> at) & 1) != 0;
  }

  void add_kept_runs(int s, int c) {
    const int variants = static_cast<int>(stage(s).variants.size());
    for (int v = 0; v <= variants; ++v) {
      KeptRun run = make_kept_run(s, model_.context(s, c), v);
      auto& context =
          model_.contexts[static_cast<size_t>(s)][static_cast<size_t>(c)];
      context.kept_runs.push_back(run);
    }
  }

  KeptRun make_kept_run(int s, const Context& context, int variant) {
    const KeptRunCosts& costs = stage(s).kept_run(variant);
    const auto held = held_by(s, context, costs);
    const auto is_held = [&](int id) {
      return std::find(held.begin(), held.end(), id) != held.end();
    };
    KeptRun run;
    run.variant = variant;
    run.ms = static_cast<float>(forward_ms(costs) + backward_ms(costs));
    run.unused_ms = static_cast<float>(unused_ms(s, costs));
    run.held_bytes = costs.saved_bytes;
    for (const int id : held) run.held_bytes += buffer(id).bytes;
    run.forward_bytes = context.own_bytes + boundary(s + 1).made_bytes +
                        costs.saved_bytes + costs.keep_extra_bytes;
    run.backward_bytes = run.held_bytes + costs.backward_extra_bytes;
    if (s + 1 == n_) {
      run.backward_bytes += chain_costs_.output_gradient_bytes;
      for (const int id : boundary(n_).distinct) {
        if (!is_held(id)) run.backward_bytes += buffer(id).bytes;
      }
      return run;
    }
    run.backward_bytes += stage(s + 1).input_gradient_bytes;
    run.next = find_context(s + 1, mask(s + 1, [&](int id) {
                              return is_held(id) || is_pinned(s, context, id);
                            }));
    return run;
  }

  /// Returns the boundary buffers that only the run's autograd graph holds.
  std::vector<int> held_by(int s, const Context& context,
                           const KeptRunCosts& run) const {
    std::vector<int> held;
    const auto add = [&](int id) {
      if (buffer(id).maker < 0 || buffer(id).bytes == 0) return;
      if (is_pinned(s, context, id)) return;
      if (std::find(held.begin(), held.end(), id) == held.end()) {
        held.push_back(id);
      }
    };
    for (const int i : run.saved_inputs) {
      add(boundary(s).tensors.at(static_cast<size_t>(i)));
    }
    for (const int i : run.saved_outputs) {
      add(boundary(s + 1).tensors.at(static_cast<size_t>(i)));
    }
    return held;
  }

  const ChainCosts& chain_costs_;
  const int n_;
  bool launch_bound_ = false;
  std::vector<Buffer> buffers_;
  std::vector<Boundary> boundaries_;
  ChainModel model_;
};

}  // namespace

ChainModel make_chain_model(const ChainCosts& chain_costs,
                            const ModelLimits& limits) {
  return ModelBuilder(chain_costs, limits).take();
}

}  // namespace reprise::detail
