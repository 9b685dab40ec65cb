#include "train/store/state_files.h"

#include "base/file.h"
#include "support.h"
#include "temporary.h"
#include "train/store/state_names.h"

#include <reprise/train/config.h>

#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <map>
#include <sys/resource.h>

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

/// Warnings, and the step of the newest state.
struct Newest {
  explicit Newest(const RunDirectory& run) {
    const auto files = StateFiles::newest(
        run, [this](const auto& text) { warnings.push_back(text); });
    if (files) step = files->state().step;
  }
  std::vector<std::string> warnings;
  int64_t step = 0;
};

std::string path_of(const RunDirectory& run, int64_t step) {
  return detail::state_path(run.path(), step, 0);
}

void flip(const std::string& path, size_t byte) {
  std::string bytes = read_text(path);
  bytes.at(byte) = static_cast<char>(bytes.at(byte) ^ 1);
  std::ofstream(path, std::ios::binary) << bytes;
}

TEST(StateFiles, IncompleteStatesAreSetAside) {
  const testing::TemporaryDirectory folder;
  auto run = RunDirectory::create(folder / "run", to_json(TrainConfig()));
  const auto tensor = torch::randn({300});
  EXPECT_EQ(Newest(run).step, 0);
  save(run, tensor, 1);
  // The file of rank 0 was never written.
  save_state_part(run.path(), at_step(2), 1,
                  {{}, {piece_of(tensor, 100, 300)}});
  EXPECT_EQ(Newest(run).step, 1);
  EXPECT_TRUE(Newest(run).warnings.empty());
  // Values are missing between the parts.
  save(run, tensor, 2, /*middle=*/120);
  const Newest middle(run);
  EXPECT_EQ(middle.step, 1);
  ASSERT_EQ(middle.warnings.size(), 1u);
  EXPECT_NE(middle.warnings[0].find("values from 100"), std::string::npos);
  EXPECT_TRUE(fs::exists(path_of(run, 2) + ".broken"));
  EXPECT_TRUE(fs::exists(detail::part_path(path_of(run, 2), 1) + ".broken"));
  EXPECT_TRUE(Newest(run).warnings.empty());
  // A part is cut off.
  save(run, tensor, 3);
  EXPECT_EQ(Newest(run).step, 3);
  const std::string part = detail::part_path(path_of(run, 3), 1);
  fs::resize_file(part, fs::file_size(part) - 1);
  EXPECT_EQ(Newest(run).step, 1);
  // A part is missing.
  save(run, tensor, 4);
  fs::remove(detail::part_path(path_of(run, 4), 1));
  EXPECT_EQ(Newest(run).step, 1);
}

TEST(StateFiles, FlippedBitsAreSeenInEveryPart) {
  const testing::TemporaryDirectory folder;
  auto run = RunDirectory::create(folder / "run", to_json(TrainConfig()));
  const auto tensor = torch::randn({300});
  save(run, tensor, 1);
  int64_t step = 2;
  for (const bool of_part : {false, true}) {
    for (const double where : {0.0, 0.02, 0.3, 0.9, 0.999}) {
      save(run, tensor, step);
      const std::string path = of_part
                                   ? detail::part_path(path_of(run, step), 1)
                                   : path_of(run, step);
      const auto bytes = static_cast<double>(fs::file_size(path));
      flip(path, static_cast<size_t>(where * bytes));
      const Newest newest(run);
      EXPECT_EQ(newest.step, 1) << of_part << " " << where;
      EXPECT_EQ(newest.warnings.size(), 1u);
      ++step;
    }
  }
}

TEST(StateFiles, PartsOfAnotherSaveAreRefused) {
  const testing::TemporaryDirectory folder;
  auto run = RunDirectory::create(folder / "run", to_json(TrainConfig()));
  const auto tensor = torch::randn({300});
  const auto write = [&](int64_t step, const char* rank1, const char* rank0) {
    save_state_part(run.path(), at_step(step), 1,
                    {{}, {piece_of(tensor, 100, 300)}, rank1});
    save_state(run, at_step(step), 2,
               StatePart{{}, {piece_of(tensor, 0, 100)}, rank0}, 2);
  };
  write(1, "a", "a");
  write(2, "b", "c");
  const Newest newest(run);
  EXPECT_EQ(newest.step, 1);
  ASSERT_EQ(newest.warnings.size(), 1u);
  EXPECT_NE(newest.warnings[0].find("belongs to another state"),
            std::string::npos);
}

/// Starting from the beginning would look like progress.
TEST(StateFiles, RefusesToStartOver) {
  const testing::TemporaryDirectory folder;
  auto run = RunDirectory::create(folder / "run", to_json(TrainConfig()));
  for (int64_t step = 1; step <= 2; ++step) {
    save(run, torch::randn({300}), step);
    fs::resize_file(path_of(run, step), 100 * step);
  }
  for (int i = 0; i < 2; ++i) {  // also when they have been set aside before
    const std::string text = testing::error_of([&] { Newest newest(run); });
    EXPECT_NE(text.find("holds no whole state"), std::string::npos) << text;
    EXPECT_NE(text.find(run.path()), std::string::npos) << text;
  }
}

/// Broken states with higher numbers must not make whole ones the oldest.
TEST(StateFiles, PrunesByAgeAmongWholeStates) {
  const testing::TemporaryDirectory folder;
  auto run = RunDirectory::create(folder / "run", to_json(TrainConfig()));
  const auto tensor = torch::randn({300});
  save(run, tensor, 8);
  save(run, tensor, 9);
  fs::resize_file(path_of(run, 8), 30);
  fs::resize_file(path_of(run, 9), 30);
  save(run, tensor, 1);
  save(run, tensor, 2);
  EXPECT_EQ(Newest(run).step, 2);
  fs::resize_file(path_of(run, 2), 30);
  std::vector<std::string> warnings;
  save_state(run, at_step(3), 1, {{{"a", tensor}}, {}}, 2,
             [&](const auto& text) { warnings.push_back(text); });
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find(path_of(run, 2) + ".broken"), std::string::npos);
  // 2 was set aside, so 3 and 1 are the last two.
  EXPECT_EQ(detail::states_in(run.path()),
            (std::vector{path_of(run, 1), path_of(run, 3)}));
  save_state(run, at_step(4), 1, {{{"a", tensor}}, {}}, 2);
  EXPECT_EQ(detail::states_in(run.path()),
            (std::vector{path_of(run, 3), path_of(run, 4)}));
}

/// As versions before checksums wrote it.
TEST(StateFiles, ReadsStatesWithoutChecksums) {
  const testing::TemporaryDirectory folder;
  auto run = RunDirectory::create(folder / "run", to_json(TrainConfig()));
  save_state(run, at_step(5), 1, {{{"a", torch::ones({2})}}, {}}, 2);
  const std::string path = path_of(run, 5);
  std::string bytes = read_text(path);
  auto header = nlohmann::json::parse(bytes.substr(8, bytes.size() - 16));
  header["__metadata__"].erase("reprise-checksums");
  auto state = nlohmann::json::parse(
      header["__metadata__"]["reprise"].get<std::string>());
  const auto write = [&] {
    header["__metadata__"]["reprise"] = state.dump();
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t size = text.size();
    std::ofstream(path, std::ios::binary)
        << std::string(reinterpret_cast<const char*>(&size), 8) << text
        << bytes.substr(bytes.size() - 8);
  };
  for (const char* key : {"format", "data"}) state.erase(key);
  write();
  const auto files = StateFiles::newest(run, [](const auto&) { FAIL(); });
  ASSERT_TRUE(files.has_value());
  EXPECT_FALSE(files->has_checksums());
  EXPECT_TRUE(torch::equal(files->read("a"), torch::ones({2})));
  // A state that says that it has some.
  state["format"] = 2;
  write();
  EXPECT_NE(detail::why_broken(path, true).find("expected checksums"),
            std::string::npos);
}

/// The file may be whole: neither set aside nor passed over.
TEST(StateFiles, FailuresOfTheSystemAreNotDamage) {
  const testing::TemporaryDirectory folder;
  auto run = RunDirectory::create(folder / "run", to_json(TrainConfig()));
  save_state(run, at_step(1), 1, {{{"a", torch::ones({2})}}, {}}, 2);
  save_state(run, at_step(2), 1, {{{"a", torch::ones({2})}}, {}}, 2);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit none = before;
  none.rlim_cur = 0;
  setrlimit(RLIMIT_NOFILE, &none);
  const std::string text =
      testing::error_of([&] { detail::why_broken(path_of(run, 2), true); });
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_NE(text.find("Too many open files"), std::string::npos) << text;
  EXPECT_EQ(Newest(run).step, 2);
}

/// The warning about a state with this metadata and this tensor of four values.
std::string warning_about(const std::map<std::string, std::string>& metadata) {
  const testing::TemporaryDirectory folder;
  auto run = RunDirectory::create(folder / "run", to_json(TrainConfig()));
  const std::string path = run.path() + "/state-0000000001-000000.safetensors";
  write_safetensors(path, {{"parameter.a", torch::ones({4})}}, metadata);
  std::string warning;
  testing::error_of([&] {
    StateFiles::newest(run, [&](const auto& text) { warning = text; });
  });
  EXPECT_NE(warning.find(path), std::string::npos) << warning;
  return warning;
}

/// As of at_step(1), with `from` replaced by `to`.
std::string state_with(const std::string& from, const std::string& to) {
  std::string text = to_text(at_step(1));
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from << " in " << text;
  return text.replace(at, from.size(), to);
}

TEST(StateFiles, MetadataIsChecked) {
  const auto expect = [](const std::string& part,
                         const std::map<std::string, std::string>& metadata) {
    const std::string text = warning_about(metadata);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const std::string good = to_text(at_step(1));
  expect("expected the state of a run", {});
  expect("nested more than", {{"reprise", std::string(100'000, '[')}});
  expect("expected counts",
         {{"reprise", state_with("\"step\":1", "\"step\":-1")}});
  expect("hexadecimal",
         {{"reprise", state_with("\"stream\":\"\"", "\"stream\":\"0x\"")}});
  for (const char* count : {"-1", "0", "x", "99999999999"}) {
    expect("expected a number of parts", {{"reprise", good}, {"parts", count}});
  }
  expect("JSON object", {{"reprise", good}, {"pieces", "[1]"}});
  for (const char* sizes :
       {R"("sizes":[-4],"strides":[1])", R"("sizes":[4],"strides":[100000000])",
        R"("sizes":[4],"strides":[0])", R"("sizes":[4,4],"strides":[1])",
        R"("sizes":[4294967296,4294967296],"strides":[4294967296,1])"}) {
    expect("parameter.a",
           {{"reprise", good},
            {"pieces",
             R"({"parameter.a":{)" + std::string(sizes) + R"(,"from":0}})"}});
  }
}

}  // namespace
}  // namespace reprise
