#include "compat/process_group.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#ifdef REPRISE_HAS_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

namespace reprise::compat {
namespace {

// Since LibTorch 2.0, backends are not process groups.
#if TORCH_VERSION_MAJOR >= 2
using Backend = c10d::Backend;
#else
using Backend = c10d::ProcessGroup;
#endif
using C10dWork = c10d::Work;

std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

/// Gloo supports few types. Operations that only copy values use bytes.
torch::Tensor as_bytes(const torch::Tensor& tensor) {
  return tensor.view({-1}).view(torch::kByte);
}

/// Our store as c10d's. Its waits are those of c10d's interface.
class C10dStore final : public c10d::Store {
 public:
  C10dStore(std::shared_ptr<KeyValueStore> store,
            std::chrono::milliseconds timeout)
      : c10d::Store(timeout), store_(std::move(store)) {}

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    store_->set(key, {value.begin(), value.end()});
  }
  std::vector<uint8_t> get(const std::string& key) override {
    return bytes_of(await(key, getTimeout()));
  }
  int64_t add(const std::string& key, int64_t value) override {
    return store_->add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    return store_->remove(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    return std::all_of(keys.begin(), keys.end(), [this](const auto& key) {
      return store_->get(key).has_value();
    });
  }
  int64_t getNumKeys() override { return store_->count(); }
  void wait(const std::vector<std::string>& keys) override {
    wait(keys, getTimeout());
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    const auto until = std::chrono::steady_clock::now() + timeout;
    for (const std::string& key : keys) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(
          until - std::chrono::steady_clock::now());
      await(key, std::max(left, std::chrono::milliseconds(0)));
    }
  }

#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
  // Pure virtual in recent versions of LibTorch and absent in older ones.
  virtual c10::intrusive_ptr<c10d::Store> clone() {
    return c10::make_intrusive<C10dStore>(store_->clone(), getTimeout());
  }
#ifdef __clang__
#pragma clang diagnostic pop
#endif

 private:
  std::string await(const std::string& key, std::chrono::milliseconds timeout) {
    auto value = store_->get(key, timeout);
    TORCH_CHECK(value, "[ranks] no rank has set ", key, " within ",
                timeout.count(), " ms");
    return std::move(*value);
  }

  std::shared_ptr<KeyValueStore> store_;
};

}  // namespace

struct Work::Impl {
  std::vector<c10::intrusive_ptr<C10dWork>> works;
  std::vector<torch::Tensor> held;  // until the operation has finished
  bool has_callback = false;        // whether the backend reports completion
};

void Work::wait() {
  TORCH_INTERNAL_ASSERT(impl_);
  for (const auto& work : impl_->works) work->wait();
}

bool Work::done() const {
  return std::all_of(impl_->works.begin(), impl_->works.end(),
                     [](const auto& work) { return work->isCompleted(); });
}

bool Work::when_done(std::function<void()> body) {
  if (!impl_->has_callback) return false;
  const auto left = std::make_shared<std::atomic<size_t>>(impl_->works.size());
  for (const auto& work : impl_->works) {
    work->getFuture()->addCallback([body, left](c10::ivalue::Future&) {
      if (--*left == 0) body();
    });
  }
  return true;
}

struct ProcessGroup::Impl {
  c10::intrusive_ptr<Backend> backend;
  int rank = 0;
  int size = 1;
  bool gloo = true;

  Work start(c10::intrusive_ptr<C10dWork> work,
             std::vector<torch::Tensor> held) {
    Work made;
    made.impl_ = std::make_shared<Work::Impl>();
    made.impl_->works.push_back(std::move(work));
    made.impl_->held = std::move(held);
    made.impl_->has_callback = gloo;
    return made;
  }

  Work reduce(const torch::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
    std::vector<torch::Tensor> list{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    auto work = backend->allreduce(list, options);
    return start(std::move(work), std::move(list));
  }
};

bool ProcessGroup::available(const std::string& backend) {
#ifdef REPRISE_HAS_NCCL
  if (backend == "nccl") return true;
#endif
  return backend == "gloo";
}

ProcessGroup::ProcessGroup(std::shared_ptr<KeyValueStore> store,
                           const Options& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->rank = options.rank;
  impl_->size = options.size;
  impl_->gloo = options.backend == "gloo";
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>(
      options.name,
      c10::make_intrusive<C10dStore>(std::move(store), options.timeout));
  if (impl_->gloo) {
    auto o = c10d::ProcessGroupGloo::Options::create(options.timeout);
    o->devices.push_back(
        options.address.empty()
            ? c10d::ProcessGroupGloo::createDefaultDevice()
            : c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
    o->threads = 2;
    impl_->backend = c10::make_intrusive<c10d::ProcessGroupGloo>(
        prefixed, options.rank, options.size, std::move(o));
    return;
  }
#ifdef REPRISE_HAS_NCCL
  if (options.backend == "nccl") {
    auto o = c10d::ProcessGroupNCCL::Options::create();
    o->timeout = options.timeout;
    impl_->backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(
        prefixed, options.rank, options.size, std::move(o));
    return;
  }
#endif
  TORCH_CHECK(
      false, "[--backend] expected a backend that this LibTorch supports, got ",
      options.backend);
}

ProcessGroup::~ProcessGroup() = default;

Work ProcessGroup::all_reduce_sum(const torch::Tensor& tensor) {
  return impl_->reduce(tensor, c10d::ReduceOp::SUM);
}

Work ProcessGroup::all_reduce_max(const torch::Tensor& tensor) {
  return impl_->reduce(tensor, c10d::ReduceOp::MAX);
}

Work ProcessGroup::broadcast(const torch::Tensor& tensor, int from) {
  std::vector<torch::Tensor> list{impl_->gloo ? as_bytes(tensor) : tensor};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  auto work = impl_->backend->broadcast(list, options);
  return impl_->start(std::move(work), std::move(list));
}

Work ProcessGroup::all_to_all(const torch::Tensor& output,
                              const torch::Tensor& input) {
  torch::Tensor out = as_bytes(output);
  torch::Tensor in = as_bytes(input);
  TORCH_INTERNAL_ASSERT(out.numel() == in.numel() &&
                        in.numel() % impl_->size == 0);
  std::vector<int64_t> equal;  // parts
  auto work = impl_->backend->alltoall_base(out, in, equal, equal);
  return impl_->start(std::move(work), {out, in});
}

Work ProcessGroup::all_gather(const torch::Tensor& output,
                              const torch::Tensor& input) {
  torch::Tensor out = as_bytes(output);
  torch::Tensor in = as_bytes(input);
  TORCH_INTERNAL_ASSERT(out.numel() == in.numel() * impl_->size);
  if (!impl_->gloo) {
    auto work = impl_->backend->_allgather_base(out, in);
    return impl_->start(std::move(work), {out, in});
  }
  // Gloo's own gather allocates a second output while it runs, and if that fails on one rank,
  // the others wait forever. Broadcasts work in place and send as many bytes.
  const auto parts = out.chunk(impl_->size);
  torch::Tensor mine = parts[static_cast<size_t>(impl_->rank)];
  if (mine.data_ptr() != in.data_ptr()) mine.copy_(in);
  Work all = broadcast(parts[0], 0);
  for (int from = 1; from < impl_->size; ++from) {
    const Work one = broadcast(parts[static_cast<size_t>(from)], from);
    all.impl_->works.push_back(one.impl_->works.front());
  }
  all.impl_->held = {out, in};
  return all;
}

void ProcessGroup::exchange_numbers(const torch::Tensor& got,
                                    const torch::Tensor& sent,
                                    std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + timeout;
  constexpr int kTag = 1;
  got[impl_->rank] = sent[impl_->rank];
  std::vector<c10::intrusive_ptr<C10dWork>> works;
  for (int other = 0; other < impl_->size; ++other) {
    if (other == impl_->rank) continue;
    std::vector<torch::Tensor> to{sent.slice(0, other, other + 1)};
    std::vector<torch::Tensor> from{got.slice(0, other, other + 1)};
    works.push_back(impl_->backend->send(to, other, kTag));
    works.push_back(impl_->backend->recv(from, other, kTag));
  }
  for (const auto& work : works) {
    // 0 would be no limit.
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    work->wait(std::max(left, std::chrono::milliseconds(1)));
  }
}

void ProcessGroup::shut_down() {
#ifdef REPRISE_HAS_NCCL
  if (auto* nccl =
          dynamic_cast<c10d::ProcessGroupNCCL*>(impl_->backend.get())) {
    nccl->shutdown();
  }
#endif
}

}  // namespace reprise::compat
