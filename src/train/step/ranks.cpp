#include "train/step/ranks.h"

#include <utility>

namespace reprise::detail {
namespace {

class OneProcess final : public Ranks {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  bool can_stop_in_window() const override { return true; }
  std::vector<int64_t> all_reduce_max(std::vector<int64_t> values) override {
    return values;
  }
  std::vector<double> all_reduce_sum(std::vector<double> values) override {
    return values;
  }
  std::string broadcast_text(const std::string& text) override { return text; }
  void broadcast(const std::vector<torch::Tensor>&) override {}
  void broadcast_named(NamedTensors&) override {}
  void require_same(const std::map<std::string, std::string>&) override {}
  void heartbeat() override {}
  void pause_watchdog() override {}
  void fail(const std::string&) noexcept override {}
  std::shared_ptr<RankGroup> group() const override { return nullptr; }
};

class ManyProcesses final : public Ranks {
 public:
  explicit ManyProcesses(std::shared_ptr<RankGroup> group)
      : group_(std::move(group)) {}
  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  bool can_stop_in_window() const override { return false; }
  std::vector<int64_t> all_reduce_max(std::vector<int64_t> values) override {
    return group_->all_reduce_max(std::move(values));
  }
  std::vector<double> all_reduce_sum(std::vector<double> values) override {
    return group_->all_reduce_sum(std::move(values));
  }
  std::string broadcast_text(const std::string& text) override {
    return group_->broadcast_text(text);
  }
  void broadcast(const std::vector<torch::Tensor>& tensors) override {
    group_->broadcast(tensors);
  }
  void broadcast_named(NamedTensors& tensors) override {
    group_->broadcast_named(tensors);
  }
  void require_same(const std::map<std::string, std::string>& values) override {
    group_->require_same(values);
  }
  void heartbeat() override { group_->heartbeat(); }
  void pause_watchdog() override { group_->pause_watchdog(); }
  void fail(const std::string& what) noexcept override { group_->fail(what); }
  std::shared_ptr<RankGroup> group() const override { return group_; }

 private:
  std::shared_ptr<RankGroup> group_;
};

}  // namespace

std::unique_ptr<Ranks> make_ranks(std::shared_ptr<RankGroup> group) {
  if (!group) return std::make_unique<OneProcess>();
  return std::make_unique<ManyProcesses>(std::move(group));
}

}  // namespace reprise::detail
