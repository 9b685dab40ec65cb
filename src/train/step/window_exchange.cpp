#include "train/step/window_exchange.h"

#include "base/hash.h"
#include "base/splitmix.h"
#include "distributed/sync_batch_norm.h"
#include "plan/exchange_memory.h"
#include "train/optim/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

/// Returns the prefixes of optimizer state with one value per parameter value,
/// which can be sharded anywhere.
std::vector<std::string> state_prefixes(const OptimizerOptions& options) {
  const OptimizerInfo& info = find_optimizer(options.name);
  if (info.elementwise_state != nullptr) return info.elementwise_state(options);
  TORCH_CHECK(false,
              "[--shard] optimizer works with sgd, adam and adamw, whose state "
              "can be divided anywhere, got ",
              options.name);
}

std::vector<GradientReducer::Parameter> parameters_by_stage(
    const Model& model, const NamedTensors& parameters) {
  std::map<const void*, int> first_stage;
  for (int i = model.chain.size(); i-- > 0;) {
    for (const auto& module : model.chain[i].modules()) {
      for (const auto& parameter : module->parameters()) {
        first_stage[parameter.unsafeGetTensorImpl()] = i;
      }
    }
  }
  std::vector<GradientReducer::Parameter> list;
  std::set<const void*> seen;
  for (const auto& [name, parameter] : parameters) {
    const void* key = parameter.unsafeGetTensorImpl();
    if (!seen.insert(key).second) continue;
    const auto found = first_stage.find(key);
    list.push_back(
        {name, parameter, found == first_stage.end() ? 0 : found->second});
  }
  return list;
}

/// Returns the largest number of channels of the model's BatchNorm layers; 0 if
/// there are none.
int64_t most_channels(const Model& model) {
  int64_t most = 0;
  for (const auto& module : model.root->modules(/*include_self=*/false)) {
    if (const auto* norm = module->as<SyncBatchNorm2d>()) {
      most = std::max(most, norm->options.num_features());
    }
  }
  return most;
}

/// Returns the names, shapes and types of all parameters.
std::string digest(const NamedTensors& parameters) {
  std::string text;
  for (const auto& [name, tensor] : parameters) {
    text += fmt::format("{} {} ", name, c10::toString(tensor.scalar_type()));
    for (const int64_t size : tensor.sizes()) text += fmt::format("{},", size);
  }
  return fmt::format("{} parameters {:016x}", parameters.size(), fnv1a(text));
}

/// Returns the name, size and order of the training data.
std::string digest(const TrainSetup& setup) {
  const Dataset& data = *setup.data.train;
  std::string text =
      fmt::format("{}, {} samples", setup.data.name, data.epoch_size());
  if (const auto order = data.order(/*epoch=*/0, setup.options.seed)) {
    uint64_t hash = 0;
    for (const int64_t index : *order) {
      hash = splitmix(hash, static_cast<uint64_t>(index));
    }
    text += fmt::format(" in the order {:016x}", hash);
  }
  return text;
}

}  // namespace

StatePiece state_piece(ParameterShards::Piece piece) {
  return {std::move(piece.name), std::move(piece.values),
          piece.parameter.sizes().vec(), piece.parameter.strides().vec(),
          piece.from};
}

namespace {

class NoExchange final : public WindowExchange {};

/// The ranks that share one copy of the state with this one, and those of other groups that
/// have the same pieces; null if there is one group.
struct ShardGroups {
  std::shared_ptr<RankGroup> sharing, replicas;

  ShardGroups(const Ranks& ranks, const TrainOptions& options)
      : sharing(ranks.group()) {
    const int size = static_cast<int>(options.sharing_ranks());
    if (options.shard == Sharding::kNone || size == ranks.size()) return;
    sharing = ranks.group()->split(ranks.rank() / size);
    replicas = ranks.group()->split(ranks.rank() % size);
  }
};

class RankExchange final : public WindowExchange {
 public:
  RankExchange(Ranks& ranks, const TrainSetup& setup, ShardGroups groups)
      : ranks_(ranks),
        groups_(std::move(groups)),
        parameters_(setup.parameters),
        shard_(setup.options.shard),
        bf16_(setup.options.reduce == ReduceType::kBf16),
        bucket_bytes_(setup.options.bucket_bytes),
        stages_(setup.model.chain.size()),
        sharded_parameters_(setup.sharded) {
    const TrainOptions& options = setup.options;
    ReducerOptions reducing;
    reducing.bucket_bytes = options.bucket_bytes;
    reducing.bf16 = bf16_;
    reducing.shard = sharded();
    reducing.replicas = groups_.replicas;
    reducing.everyone = ranks.group();
    reducing.most_in_flight =
        rules_of(shard_, groups_.sharing->size()).most_in_flight;
    if (sharded()) prefixes_ = state_prefixes(options.optimizer);
    if (sharded_parameters_) {
      reducer_.emplace(groups_.sharing, sharded_parameters_->trained(),
                       reducing);
    } else {
      reducer_.emplace(groups_.sharing,
                       parameters_by_stage(setup.model, parameters_), reducing);
    }
    const int64_t channels =
        options.sync_norm && ranks.size() > 1 ? most_channels(setup.model) : 0;
    if (channels > 0) {
      norms_ = std::make_shared<SyncBatchNormGroup>(ranks.group(), channels);
    }
  }

  void attach(ExecutionOptions& options, bool cuts) override {
    if (cuts) options.cuts = reducer_->cuts();
    options.final_from = [this](int stage) {
      if (reducing_) reducer_->final_from(stage);
    };
  }

  ExchangeMemory memory(bool keeps_gradients) const override {
    if (groups_.sharing->size() == 1 && !groups_.replicas && !sharded()) {
      return {};
    }
    ExchangeRules rules = rules_of(shard_, groups_.sharing->size(), bf16_);
    rules.keeps_gradients = keeps_gradients;
    return exchange_memory(reducer_->sent_buckets(), stages_, rules);
  }
  WindowTraffic traffic() const override {
    const int64_t bytes = reducer_->gradient_bytes();
    WindowTraffic traffic;
    traffic.gradient_bytes = bf16_ ? bytes / 2 : bytes;
    traffic.bucket_bytes = bf16_ ? bucket_bytes_ / 2 : bucket_bytes_;
    if (sharded() && !sharded_parameters_) traffic.parameter_bytes = bytes;
    return traffic;
  }
  bool syncs_norms() const override { return norms_ != nullptr; }

  std::shared_ptr<void> alone() override {
    auto scopes = std::make_shared<std::vector<std::shared_ptr<void>>>();
    if (norms_) {
      scopes->push_back(std::make_shared<SyncBatchNormScope>(nullptr));
    }
    if (sharded_parameters_) {
      scopes->push_back(
          std::make_shared<ShardedParameters::Alone>(*sharded_parameters_));
    }
    return scopes;
  }

  void begin_attempt() override {
    window_begun_ = failed_elsewhere_ = false;
    if (norms_) norms_->open();
  }

  void begin_window(const Loader::Window& window, int64_t micro_batch,
                    bool keep_gradients,
                    const std::vector<StageVisit>& visits) override {
    const int64_t ranks = ranks_.size();
    const int64_t share = (window.samples + ranks - 1) / ranks;
    steps_left_ = (share + micro_batch - 1) / micro_batch;
    reducer_->keep_gradients(keep_gradients);
    visits_ = visits;
    if (!sharded_parameters_) return;
    // From here on, a rank that fails can take part in all gathers.
    window_begun_ = true;
    failed_elsewhere_ = ranks_.any(false);
    TORCH_CHECK(!failed_elsewhere_, "[ranks] another rank has failed");
  }

  bool needs_empty_micro_batch() const override {
    return in_step() && steps_left_ > 0;
  }

  torch::Tensor finish(const torch::Tensor& loss) override {
    reducer_->backward_ended();
    if (norms_) norms_->close();
    return reducer_->finish(loss);
  }

  bool failed_elsewhere() const override {
    return failed_elsewhere_ || (norms_ && norms_->failed_elsewhere());
  }

  void abort_attempt() override {
    reducing_ = false;
    if (sharded_parameters_) {
      finish_gathers();
    } else if (norms_) {
      norms_->fail();
    }
    reducer_->abandon_window();
  }

  NamedTensors updated_parameters(
      const NamedTensors& parameters) const override {
    return sharded() ? reducer_->shards() : parameters;
  }
  bool sharded() const override { return shard_ != Sharding::kNone; }
  std::shared_ptr<RankGroup> sharing() const override {
    return groups_.sharing;
  }
  std::shared_ptr<RankGroup> replicas() const override {
    return groups_.replicas;
  }
  const ShardedParameters* sharded_parameters() const override {
    return sharded_parameters_.get();
  }

  void share_updated(const Guard& guarded) override {
    if (!sharded()) return;
    for (auto [name, piece] : reducer_->shards()) piece.mutable_grad().reset();
    if (sharded_parameters_) return;
    guarded([this] { reducer_->reserve_gather(); });
    reducer_->all_gather_parameters();
  }

  NamedTensors whole_state(NamedTensors own) override {
    if (!sharded()) return own;
    NamedTensors list = reducer_->gather_full(own, prefixes_);
    // All shards of a parameter have the same counter.
    const std::map<std::string, torch::Tensor> by_name(own.begin(), own.end());
    std::vector<int64_t> counts;
    const auto count = [&](const std::string& name) {
      const auto found = by_name.find(name);
      counts.push_back(found == by_name.end() ? -1
                                              : found->second.item<int64_t>());
    };
    count("step");
    for (const auto& item : parameters_) count("step." + item.first);
    counts = ranks_.all_reduce_max(std::move(counts));
    for (size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] < 0) continue;
      list.emplace_back(i == 0 ? "step" : "step." + parameters_[i - 1].first,
                        torch::scalar_tensor(counts[i], torch::kLong));
    }
    return list;
  }

  StatePart part_of_state(NamedTensors own) const override {
    StatePart part;
    std::set<std::string> divided;
    const ParameterShards* const shards = reducer_->parameter_shards();
    for (size_t i = 0; shards != nullptr && i < prefixes_.size(); ++i) {
      for (auto& piece : shards->pieces(own, prefixes_[i])) {
        divided.insert(piece.name);
        if (!saves_pieces()) continue;
        part.pieces.push_back(state_piece(std::move(piece)));
      }
    }
    for (auto& item : own) {
      if (divided.count(item.first) == 0) part.whole.push_back(std::move(item));
    }
    return part;
  }

  NamedTensors own_state(NamedTensors whole) const override {
    if (!sharded()) return whole;
    NamedTensors state = reducer_->select_shards(whole, prefixes_);
    std::set<std::string> here;
    for (const auto& item : reducer_->shards()) here.insert(item.first);
    std::erase_if(state, [&](const auto& item) {
      return item.first.starts_with("step.") &&
             here.count(item.first.substr(5)) == 0;
    });
    return state;
  }

  const GradientReducer::Counters* counters() const override {
    return &reducer_->counters();
  }

 private:
  /// Whether ranks wait for each other within a micro-batch.
  bool in_step() const { return norms_ || sharded_parameters_; }

  bool begin_micro_batch(bool last, bool counts) override {
    --steps_left_;
    reducing_ = last && (!in_step() || steps_left_ == 0);
    if (norms_) norm_scope_.emplace(norms_, counts);
    return reducing_;
  }
  void end_micro_batch() override {
    norm_scope_.reset();
    reducing_ = false;
  }

  /// Takes part in what the other ranks still gather in this window.
  void finish_gathers() {
    if (!window_begun_) {
      if (norms_) norms_->fail();
      if (!failed_elsewhere_) ranks_.any(true);
      return;
    }
    if (failed_elsewhere_) return;
    // The other ranks exchange statistics between two gathers.
    std::future<void> told;
    if (norms_) {
      told = std::async(std::launch::async, [this] { norms_->fail(); });
    }
    const auto send_zeros = [this](const StageVisit& visit) {
      if (steps_left_ == 0 && visit.backward) {
        reducer_->abandon_from(visit.stage);
      }
    };
    sharded_parameters_->finish_without_computing(send_zeros);
    while (steps_left_ > 0) {
      --steps_left_;
      sharded_parameters_->begin(visits_);
      sharded_parameters_->finish_without_computing(send_zeros);
    }
    if (told.valid()) told.get();
  }

  Ranks& ranks_;
  ShardGroups groups_;
  NamedTensors parameters_;
  Sharding shard_ = Sharding::kNone;
  bool bf16_ = false;  // type of gradients on the way
  int64_t bucket_bytes_ = 0;
  int stages_ = 0;
  std::shared_ptr<ShardedParameters> sharded_parameters_;  // may be null
  std::vector<std::string> prefixes_;  // of the optimizer state, if sharded
  std::optional<GradientReducer> reducer_;
  std::shared_ptr<SyncBatchNormGroup>
      norms_;  // null: each rank has its own statistics
  std::optional<SyncBatchNormScope> norm_scope_;
  std::vector<StageVisit> visits_;  // of each micro-batch
  int64_t steps_left_ = 0;  // micro-batches left on the rank with most of them
  bool reducing_ = false;   // whether the current backward sends gradients
  bool window_begun_ = false;
  bool failed_elsewhere_ = false;  // before the window
};

}  // namespace

std::unique_ptr<WindowExchange> make_window_exchange(Ranks& ranks,
                                                     TrainSetup& setup) {
  if (!ranks.group()) return std::make_unique<NoExchange>();
  const TrainOptions& options = setup.options;
  TORCH_CHECK(options.ranks == ranks.size(),
              "[Trainer] expected the options' ranks to be the group's ",
              ranks.size(), ", got ", options.ranks);
  ranks.require_same(
      {{"the model", digest(setup.parameters)}, {"data", digest(setup)}});
  ranks.broadcast(setup.parameter_list);
  ranks.broadcast(setup.model.root->buffers());
  ShardGroups groups(ranks, options);
  if (options.shard == Sharding::kParameters) {
    setup.sharded = std::make_shared<ShardedParameters>(
        groups.sharing, setup.model.chain, setup.parameters, setup.device,
        ShardedParameters::Options{options.bucket_bytes,
                                   weights_read_in_half(setup.model),
                                   type_of(options.precision)});
    setup.model.chain =
        StageParameters::wrapped(setup.model.chain, setup.sharded);
  }
  auto exchange =
      std::make_unique<RankExchange>(ranks, setup, std::move(groups));
  setup.exchange = exchange->memory(/*keeps_gradients=*/false);
  setup.exchange_of_graph = exchange->memory(/*keeps_gradients=*/true);
  return exchange;
}

}  // namespace reprise::detail
