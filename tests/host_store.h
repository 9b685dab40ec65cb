#pragma once

#include "support.h"

#include <reprise/memory/host_store.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace reprise::testing {

/// A host store that counts calls. On CUDA it forwards to a real store; on the CPU it
/// copies synchronously.
class CountingStore final : public HostStore {
 public:
  struct Counts {
    int sent = 0, fetched = 0, opened = 0;
    std::atomic<int> alive{0};
    int64_t bytes = 0;  // in host memory now
    int fails_at = -1;  // number of the fetch that throws; -1: none
  };

  explicit CountingStore(int64_t limit = int64_t{1} << 40) : limit_(limit) {
    if (testing::device().is_cuda()) {
      real_ = make_host_store(testing::device().index(), limit);
    }
  }

  std::unique_ptr<HostCopy> send(const torch::Tensor& bytes) override {
    if (counts->bytes + bytes.numel() > limit_) return nullptr;
    auto real = real_ ? real_->send(bytes) : nullptr;
    if (real_ && !real) return nullptr;
    ++counts->sent;
    return std::make_unique<Copy>(counts, bytes, std::move(real));
  }
  void trim() override {
    if (real_) real_->trim();
  }
  c10::Device device() const override { return testing::device(); }
  int64_t limit_bytes() const override { return limit_; }
  int64_t held_bytes() const override {
    return real_ ? real_->held_bytes() : counts->bytes;
  }

  std::shared_ptr<Counts> counts = std::make_shared<Counts>();

 private:
  class Copy final : public HostCopy {
   public:
    Copy(std::shared_ptr<Counts> counts, const torch::Tensor& bytes,
         std::unique_ptr<HostCopy> real)
        : counts_(std::move(counts)),
          size_(bytes.numel()),
          real_(std::move(real)) {
      EXPECT_EQ(bytes.scalar_type(), torch::kByte);
      EXPECT_TRUE(bytes.dim() == 1 && bytes.is_contiguous());
      ++counts_->alive;
      counts_->bytes += size_;
      if (real_) return;
      host_.assign(bytes.data_ptr<uint8_t>(),
                   bytes.data_ptr<uint8_t>() + size_);
      device_ = bytes;
    }
    ~Copy() override {
      --counts_->alive;
      counts_->bytes -= size_;
    }
    void leave() override {
      if (real_) return real_->leave();
      device_.reset();
    }
    const torch::Tensor& fetch() override {
      const int number = counts_->fetched++;
      TORCH_CHECK(number != counts_->fails_at, "injected fetch failure");
      if (real_) return real_->fetch();
      if (!device_.defined()) {
        device_ = torch::empty({size_}, torch::kByte);
        std::memcpy(device_.data_ptr(), host_.data(), host_.size());
      }
      return device_;
    }
    const torch::Tensor& bytes() override {
      ++counts_->opened;
      if (real_) return real_->bytes();
      EXPECT_TRUE(device_.defined());  // must have been fetched
      return device_;
    }

   private:
    std::shared_ptr<Counts> counts_;
    int64_t size_;
    std::unique_ptr<HostCopy> real_;
    std::vector<uint8_t> host_;
    torch::Tensor device_;
  };

  int64_t limit_;
  std::shared_ptr<HostStore> real_;
};

}  // namespace reprise::testing
