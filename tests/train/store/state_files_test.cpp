#include "train/store/state_files.h"

#include "support.h"
#include "temporary.h"

#include <reprise/train/config.h>

#include <filesystem>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using detail::StateFiles;
using detail::StatePart;
using detail::StatePiece;

detail::RunState at_step(int64_t step) {
  detail::RunState state;
  state.step = step;
  return state;
}

/// Values `from` to `to` of `tensor`, in the order of its memory.
StatePiece piece_of(const torch::Tensor& tensor, int64_t from, int64_t to) {
  const auto flat = tensor.as_strided({tensor.numel()}, {1});
  return {"parameter.a", flat.slice(0, from, to), tensor.sizes().vec(),
          tensor.strides().vec(), from};
}

/// Parts of two ranks; the tensor is in channels-last order.
void save(const RunDirectory& run, const torch::Tensor& tensor, int64_t step,
          int64_t middle = 100) {
  const int64_t count = tensor.numel();
  save_state_part(run.path(), at_step(step), 1,
                  {{}, {piece_of(tensor, middle, count)}});
  save_state(run, at_step(step), 2,
             StatePart{{{"buffer.b", torch::full({2}, double(step))}},
                       {piece_of(tensor, 0, std::min<int64_t>(100, count))}},
             /*keep=*/2);
}

TEST(StateFiles, PartsMakeAWholeState) {
  const testing::TemporaryDirectory folder;
  auto run = RunDirectory::create(folder / "run", to_json(TrainConfig()));
  const auto tensor =
      torch::randn({3, 4, 5, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  for (int64_t step = 1; step <= 3; ++step) save(run, tensor * step, step);
  const auto files = StateFiles::newest(run, [](const auto&) { FAIL(); });
  ASSERT_TRUE(files.has_value());
  EXPECT_EQ(files->state().step, 3);
  EXPECT_EQ(files->tensors().size(), 2u);
  EXPECT_EQ(files->tensors().at("parameter.a").sizes, tensor.sizes().vec());
  EXPECT_TRUE(torch::equal(files->read("parameter.a"), tensor * 3));
  EXPECT_TRUE(torch::equal(files->read("buffer.b"), torch::full({2}, 3.0)));
  int count = 0;  // two states of two files
  for (const auto& entry : fs::directory_iterator(run.path())) {
    count += entry.path().extension() == ".safetensors";
  }
  EXPECT_EQ(count, 4);
}

TEST(StateFiles, PassesOverIncompleteStates) {
  const testing::TemporaryDirectory folder;
  auto run = RunDirectory::create(folder / "run", to_json(TrainConfig()));
  const auto tensor = torch::randn({300});
  save(run, tensor, 1);
  std::vector<std::string> warnings;
  const auto step_of_newest = [&] {
    warnings.clear();
    const auto files = StateFiles::newest(
        run, [&](const auto& text) { warnings.push_back(text); });
    return files ? files->state().step : 0;
  };
  // The last part was never written.
  save_state_part(run.path(), at_step(2), 1,
                  {{}, {piece_of(tensor, 100, 300)}});
  EXPECT_EQ(step_of_newest(), 1);
  EXPECT_TRUE(warnings.empty());
  // Values are missing between the parts.
  save(run, tensor, 2, /*middle=*/120);
  EXPECT_EQ(step_of_newest(), 1);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("values from 100"), std::string::npos);
  // A part is cut off.
  save(run, tensor, 3);
  EXPECT_EQ(step_of_newest(), 3);
  const std::string part =
      run.path() + "/state-0000000003-000000.part-1.safetensors";
  fs::resize_file(part, fs::file_size(part) - 1);
  EXPECT_EQ(step_of_newest(), 0);  // keep = 2 has removed the first
  EXPECT_EQ(warnings.size(), 2u);
  fs::remove(part);
  EXPECT_EQ(step_of_newest(), 0);
}

}  // namespace
}  // namespace reprise
