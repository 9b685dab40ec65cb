#include "ranked_runs.h"
#include "train/points.h"

/// Streams and orders with several ranks.
namespace reprise::testing {
namespace {

TEST(RankedData, StreamsTrainAsInOneProcess) {
  const auto inputs = [] {
    // Random numbers differ between ranks.
    return point_inputs(std::make_shared<PointStream>(), /*dropout=*/0);
  };
  TrainOptions options = point_options(5);
  options.global_batch = 7;
  options.batch = 2;
  const TemporaryDirectory alone_folder;
  for (const int ranks : {2, 3}) {
    const TemporaryDirectory folder;
    const auto ends = in_ranks(ranks_in(folder.path(), ranks), [&] {
      const auto group = RankGroup::join(group_options());
      TrainOptions ranked = options;
      ranked.ranks = ranks;
      ranked.resolve();
      for (const bool resume : {false, true}) {
        std::optional<RunDirectory> directory;
        const std::string path = child_folder() + "/run";
        if (group->rank() == 0) {
          directory.emplace(resume
                                ? RunDirectory::open(path)
                                : RunDirectory::create(path, to_json(ranked)));
        }
        Trainer trainer(inputs(), ranked, {.ranks = group});
        TrainRun run;
        run.directory = directory ? &*directory : nullptr;
        run.resume = resume;
        int left = resume ? -1 : 2;
        run.stop = [&left] { return --left == 0; };
        EXPECT_EQ(trainer.run(run).stopped, !resume);
      }
      group->leave();
    });
    if (child_rank() >= 0) continue;
    expect_all_well(ends);
    const auto found = ended(folder.path());
    const auto alone =
        train_points(alone_folder / std::to_string(ranks), inputs, options);
    expect_near(alone, found, 1e-5);
  }
}

}  // namespace
}  // namespace reprise::testing
