#include "base/process.h"

#include "support.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

namespace reprise {
namespace {

ProcessResult shell(const std::string& script,
                    const ProcessOptions& options = {}) {
  return run_process({"/bin/sh", "-c", script}, options);
}

TEST(Process, GivesOutputAndStatus) {
  const auto result = shell("echo out; echo err >&2; exit 3");
  EXPECT_EQ(result.status, 3);
  EXPECT_EQ(result.signal, 0);
  EXPECT_EQ(result.out, "out\n");
  EXPECT_EQ(result.error, "err\n");
  EXPECT_FALSE(result.timed_out || result.stopped || result.killed_for_memory);
}

TEST(Process, TakesMuchOutputWithoutBlocking) {
  const auto result = shell(
      "head -c 3000000 /dev/zero | tr '\\0' x; "
      "head -c 3000000 /dev/zero | tr '\\0' y >&2; echo end >&2");
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.out.size(), 3000000u);
  EXPECT_LT(result.error.size(), 1u << 20);
  EXPECT_EQ(result.error.substr(result.error.size() - 4), "end\n");
}

TEST(Process, HasNoInput) {
  EXPECT_EQ(shell("cat").out, "");
}

TEST(Process, SaysWhichSignalEndedIt) {
  const auto result = shell("kill -SEGV $$");
  EXPECT_EQ(result.status, -1);
  EXPECT_EQ(result.signal, SIGSEGV);
  EXPECT_FALSE(result.killed_for_memory);
}

TEST(Process, EndsWhatTakesTooLong) {
  // Also where it does not listen.
  const auto result = shell("trap '' TERM; sleep 60", {.timeout_s = 0.2});
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.signal, SIGKILL);
  EXPECT_LT(result.wall_s, 20);
}

TEST(Process, EndsWhenTold) {
  const auto start = std::chrono::steady_clock::now();
  const auto result = shell("sleep 60", {.stop = [&] {
                              return std::chrono::steady_clock::now() - start >
                                     std::chrono::milliseconds(200);
                            }});
  EXPECT_TRUE(result.stopped);
  EXPECT_FALSE(result.timed_out);
  EXPECT_LT(result.wall_s, 20);
}

TEST(Process, HasAMemoryOfItsOwn) {
  const char* eater = "python3 -c 'b = bytearray(600 << 20); print(len(b))'";
  EXPECT_EQ(shell(eater).status, 0);
  const auto limited = shell(eater, {.memory_limit = int64_t{300} << 20});
  EXPECT_NE(limited.status, 0);
  EXPECT_NE(limited.error.find("MemoryError"), std::string::npos)
      << limited.error;
}

TEST(Process, ReportsItsPeak) {
  const auto result = shell(
      "exec python3 -c 'import time; b = bytearray(200 << 20); "
      "time.sleep(0.3)'");
  EXPECT_GT(result.rss_peak_bytes, int64_t{200} << 20);
  EXPECT_LT(result.rss_peak_bytes, int64_t{300} << 20);
}

TEST(Process, SaysThatAProgramIsNotThere) {
  const auto error =
      testing::error_of([] { run_process({"/no/such/program"}); });
  EXPECT_NE(error.find("cannot run /no/such/program: No such file"),
            std::string::npos)
      << error;
}

/// A study that is killed leaves no training behind.
TEST(Process, DiesWithItsParent) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t parent = fork();
  ASSERT_GE(parent, 0);
  if (parent == 0) {
    close(ends[0]);
    // The program keeps the pipe's other end for as long as it lives.
    const std::string end = std::to_string(ends[1]);
    try {
      // dash knows descriptors of one digit only.
      run_process(
          {"/bin/bash", "-c", "echo started >&" + end + "; exec sleep 300"});
    } catch (...) {
    }
    _exit(0);
  }
  close(ends[1]);
  char text[8];
  ASSERT_EQ(read(ends[0], text, sizeof text), 8);
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  pollfd gone{ends[0], POLLIN, 0};
  EXPECT_EQ(poll(&gone, 1, 10'000), 1);
  EXPECT_EQ(read(ends[0], text, sizeof text), 0);
  close(ends[0]);
}

}  // namespace
}  // namespace reprise
