#include "train/budget/host_offers.h"

#include <reprise/recompute/host_memory.h>

#include <algorithm>
#include <vector>

namespace reprise::detail {
namespace {

/// Makes the offloading variant slower than the plain run. Copies are
/// additional work, so a variant that was measured faster is noise, and must
/// not be chosen if no memory needs to be saved.
void make_dearer(KeptRunCosts& host, const KeptRunCosts& plain) {
  constexpr double kAtLeast = 1.01;
  for (const auto field :
       {&KeptRunCosts::forward_ms, &KeptRunCosts::backward_ms,
        &KeptRunCosts::forward_launch_ms, &KeptRunCosts::backward_launch_ms}) {
    host.*field = std::max(host.*field, kAtLeast * plain.*field);
  }
}

}  // namespace

void limit_host_bytes(const TrainSetup& setup, int64_t state_bytes,
                      ChainCosts& figures) {
  if (!setup.host) return;
  // Leave a reserve for micro-batches of other sizes, such as the last of a
  // window.
  const int64_t limit = (setup.host->limit_bytes() - state_bytes) / 4 * 3;
  const Chain& chain = setup.model.chain;
  struct Offer {
    StageCosts* stage;
    KeptRunCosts* run;
  };
  std::vector<Offer> offers;
  for (int i = 0; i < chain.size(); ++i) {
    const int variant = host_variant(chain[i]);
    if (variant == 0) continue;
    StageCosts& stage = figures.stages[static_cast<size_t>(i)];
    offers.push_back(
        {&stage, &stage.variants.at(static_cast<size_t>(variant) - 1)});
  }
  const auto ms_a_byte = [](const Offer& offer) {
    return offer.stage->forward_ms /
           static_cast<double>(std::max<int64_t>(offer.run->host_bytes, 1));
  };
  std::stable_sort(offers.begin(), offers.end(),
                   [&](const Offer& a, const Offer& b) {
                     return ms_a_byte(a) > ms_a_byte(b);
                   });
  int64_t sum = 0;
  for (const Offer& offer : offers) {
    const int64_t bytes = offer.run->host_bytes;
    if (bytes > 0 && sum + bytes <= limit) {
      sum += bytes;
      make_dearer(*offer.run, *offer.stage);
    } else {
      *offer.run = *offer.stage;
    }
  }
}

}  // namespace reprise::detail
