#include "base/file.h"
#include "support.h"
#include "temporary.h"

#include <reprise/base/error.h>
#include <reprise/distributed/launch.h>

#include <chrono>
#include <csignal>
#include <thread>
#include <unistd.h>

namespace reprise {
namespace {

LaunchOptions shell(int ranks, const std::string& script) {
  LaunchOptions options;
  options.ranks = ranks;
  options.argv = {"/bin/sh", "-c", script};
  return options;
}

TEST(Launch, SetsTheVariablesOfEachRank) {
  const testing::TemporaryDirectory folder;
  EXPECT_EQ(
      launch_ranks(shell(2,
                         "echo $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE "
                         "$MASTER_ADDR > " +
                             folder.path() + "/$RANK; echo $MASTER_PORT > " +
                             folder.path() + "/port-$RANK")),
      0);
  EXPECT_EQ(read_text(folder / "0"), "2 0 2 127.0.0.1\n");
  EXPECT_EQ(read_text(folder / "1"), "2 1 2 127.0.0.1\n");
  EXPECT_EQ(read_text(folder / "port-0"), read_text(folder / "port-1"));
  EXPECT_GT(std::stoi(read_text(folder / "port-0")), 0);
}

TEST(Launch, GivesEachLaunchATokenOfItsOwn) {
  const testing::TemporaryDirectory folder;
  for (const char* name : {"a", "b"}) {
    EXPECT_EQ(launch_ranks(shell(2, "echo $REPRISE_RANK_TOKEN > " +
                                        (folder / name) + "$RANK")),
              0);
  }
  EXPECT_EQ(read_text(folder / "a0").size(), 65u);
  EXPECT_EQ(read_text(folder / "a0"), read_text(folder / "a1"));
  EXPECT_NE(read_text(folder / "a0"), read_text(folder / "b0"));
}

TEST(Launch, ReturnsTheStatusOfTheRankThatFailed) {
  auto options = shell(2, "if [ $RANK = 1 ]; then exit 7; fi; exec sleep 60");
  options.grace_s = 0.1;
  std::string said;
  options.say = [&](const std::string& text) { said = text; };
  EXPECT_EQ(launch_ranks(options), 7);
  EXPECT_EQ(said, "rank 1 ended with status 7; the others end with it");
}

TEST(Launch, ReturnsOneIfASignalKilledARank) {
  auto options = shell(1, "kill -KILL $$");
  std::string said;
  options.say = [&](const std::string& text) { said = text; };
  EXPECT_EQ(launch_ranks(options), 1);
  EXPECT_EQ(said, "rank 0 was ended by signal 9 (Killed)");
}

/// A suspended rank would otherwise be waited for until the grace is over.
TEST(Launch, KillsASuspendedRankAtOnceAfterAFailure) {
  auto options =
      shell(2, "if [ $RANK = 1 ]; then sleep 0.3; exit 3; fi; kill -STOP $$");
  options.grace_s = 600;
  EXPECT_EQ(launch_ranks(options), 3);
}

TEST(Launch, ForwardsSignals) {
  const testing::TemporaryDirectory folder;
  std::thread sender([&] {
    while (access((folder / "0").c_str(), F_OK) != 0 ||
           access((folder / "1").c_str(), F_OK) != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    kill(getpid(), SIGTERM);
  });
  EXPECT_EQ(launch_ranks(
                shell(2, "touch " + folder.path() + "/$RANK; exec sleep 60")),
            128 + SIGTERM);
  sender.join();
}

TEST(Launch, MissingProgramIsAnError) {
  LaunchOptions options;
  options.argv = {"/no/such/program"};
  EXPECT_THROW(launch_ranks(options), Error);
  options.argv = {};
  EXPECT_THROW(launch_ranks(options), c10::Error);
}

}  // namespace
}  // namespace reprise
